"""Threads that decode the batches of one iterator, because many small operations of a step use one core each."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any, TypeVar

import jax

# Threads that are idle are used again: each new one would get memory of its own. There are enough for calls that wait
# for each other.
_POOL = ThreadPoolExecutor(256, "decoding")

T = TypeVar("T")
R = TypeVar("R")


def in_threads(decode: Callable[[Iterable[T]], Iterator[R]], batches: Iterable[T], number: int) -> Iterator[R]:
    """What `decode` yields on each thread, as it is finished. A batch is decoded by the thread that is free.

    An exception of a thread, or of `batches`, ends all of them at their next result.
    """
    results: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # (whether the thread ended, a result or exception)
    stopped, lock, iterator = Event(), Lock(), iter(batches)
    config: Any = jax.config
    settings = config.jax_enable_x64, config.jax_default_device  # of this thread

    def shared() -> Iterator[T]:
        while not stopped.is_set():
            with lock:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def run() -> None:
        error = None
        try:
            with jax.enable_x64(settings[0]), jax.default_device(settings[1]):
                for result in decode(shared()):
                    results.put((False, result))
                    if stopped.is_set():
                        break
        except Exception as raised:
            error = raised
        results.put((True, error))

    runs = [_POOL.submit(run) for _ in range(number)]
    try:
        running = number
        while running:
            ended, result = results.get()
            if not ended:
                yield result
            elif result is not None:
                raise result
            running -= ended
    finally:
        stopped.set()
        wait(runs)


def compiling_once(program: Callable[..., R]) -> Callable[..., R]:
    """The compiled function, of which only one thread makes the first call with arguments of the same shapes."""
    locks: dict[Hashable, Lock] = {}
    compiled: set[Hashable] = set()

    def call(*arguments: Any) -> R:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = structure, *((getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if shapes in compiled:
            return program(*arguments)
        with locks.setdefault(shapes, Lock()):
            result = program(*arguments)
            compiled.add(shapes)
        return result

    return call
