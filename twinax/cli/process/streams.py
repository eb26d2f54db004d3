"""Standard output and error of the command, which may be closed, or lead to a full disk."""

import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, NoReturn

STDOUT = "standard output"


def guard_streams() -> None:
    """Let errors of standard output name it, and ignore those of standard error: a training goes on without it.

    What is written to a closed one is dropped.
    """
    sys.stdout = _Stream(sys.stdout, _raise_named) if sys.stdout is not None else _dropped()
    sys.stderr = _Stream(sys.stderr, lambda error: None) if sys.stderr is not None else _dropped()


def drop_output() -> None:
    """Drop what standard output still holds: Python would report it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Stream(TextIOWrapper):
    """A stream that calls a function with the errors of the system."""

    def __init__(self, stream: Any, failed: Callable[[OSError], None]):
        super().__init__(
            stream.buffer,
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._failed = failed

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._failed(error)


def _raise_named(error: OSError) -> NoReturn:
    if isinstance(error, BrokenPipeError):  # not raised: rich would exit with 1
        drop_output()
        sys.exit(128 + signal.SIGPIPE)
    raise OSError(error.errno, error.strerror, STDOUT) from None


def _dropped() -> TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")
