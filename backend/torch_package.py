"""PyTorch, which is an optional package: twinax trains, translates and converts safetensors files without it."""

from importlib.util import find_spec

from .errors import MissingPackageError


def require_torch(subject: str) -> None:
    """Check that PyTorch is installed, without importing it. `subject`: what needs it, for the message.

    Raises:
        MissingPackageError: it is not installed.
    """
    if find_spec("torch") is None:
        raise MissingPackageError(f"{subject} needs PyTorch, which is not installed: pip install 'twinax[torch]'")
