"""Bytes read or written so far, for a listener such as a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Within the context, the listener is called with the number of bytes of each array that is done."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def advance(size: int) -> None:
    """Tell the listener, if there is one, that so many more bytes are done."""
    if (listener := _listener.get()) is not None:
        listener(size)
