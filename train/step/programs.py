"""Compiled programs by name. A thread compiles them in advance, while the programs that are ready run."""

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class _Compiled(NamedTuple):
    program: Any
    seconds: float  # short if the program is in the compilation cache


class Programs:
    """The programs of a training, compiled one after the other in the order in which they are added.

    `in_background`: False compiles each when it is first needed, as several processes must, which wait for each other.
    """

    def __init__(self, in_background: bool):
        self._pool = ThreadPoolExecutor(1, "compilation") if in_background else None
        self._waiting: dict[Hashable, tuple[Callable[[], Any], Future[_Compiled] | None]] = {}
        self._compiled: dict[Hashable, _Compiled] = {}

    def add(self, name: Hashable, compile_program: Callable[[], Any]) -> None:
        """Add a program, once."""
        if name in self:
            return
        future = self._pool.submit(_in_context(compile_program)) if self._pool is not None else None
        self._waiting[name] = compile_program, future

    def __contains__(self, name: Hashable) -> bool:
        return name in self._waiting or name in self._compiled

    def __getitem__(self, name: Hashable) -> Any:
        """A program. If no thread has begun with it, it is compiled here, ahead of the others."""
        return self._get(name).program

    def is_ready(self, name: Hashable) -> bool:
        """Whether the program was retrieved before; False even if it is compiled."""
        return name in self._compiled

    def seconds(self, name: Hashable) -> float:
        """How long a program took to compile."""
        return self._get(name).seconds

    def close(self) -> None:
        """Forget the programs that are not compiled yet; wait for the one that is being compiled."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _get(self, name: Hashable) -> _Compiled:
        if name not in self._compiled:
            compile_program, future = self._waiting.pop(name)
            if future is None or future.cancel():
                self._compiled[name] = _timed(compile_program)
            else:
                self._compiled[name] = future.result()
        return self._compiled[name]


def _timed(compile_program: Callable[[], Any]) -> _Compiled:
    start = time.monotonic()
    return _Compiled(compile_program(), time.monotonic() - start)


def _in_context(compile_program: Callable[[], Any]) -> Callable[[], _Compiled]:
    """A function for another thread, which has its own settings of JAX; those that change programs are passed on."""
    settings: Any = jax.config  # whose attributes are set at run time
    x64, precision = settings.jax_enable_x64, settings.jax_default_matmul_precision

    def run() -> _Compiled:
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            return _timed(compile_program)

    return run
