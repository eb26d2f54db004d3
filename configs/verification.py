"""Whether checkpoints are compared with their checksums when they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_verifies: ContextVar[bool] = ContextVar("verifies", default=True)


@contextmanager
def verifying(on: bool) -> Iterator[None]:
    """Within the context, verify checksums on reading if `on`, else skip them."""
    token = _verifies.set(on)
    try:
        yield
    finally:
        _verifies.reset(token)


def is_verifying() -> bool:
    """Whether checksums are compared on reading."""
    return _verifies.get()
