"""What the commands share: the cache of compiled programs, and how they say what is wrong or was assumed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from twinax.convert import Checkpoint

CheckpointPath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]


class UsageError(Exception):
    """What a person gave to the command cannot be used; the text is the one line that they see."""


def check_exists(*paths: str) -> None:
    """Raises: UsageError where there is nothing, before seconds of imports."""
    for path in paths:
        if not exists(path):
            raise UsageError(f"{path}: there is no such file or directory")


def check_folder(path: str | None) -> None:
    """Raises: UsageError where a file cannot be written there, before anything is computed for it."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {Path(path).parent}")
    if path is not None and Path(path).is_dir():
        raise UsageError(f"{path}: is a directory; give the name of a file")


def check_picture(flag: str, path: str | None) -> None:
    """Raises: UsageError where a picture cannot be written there."""
    check_folder(path)
    if path is not None and Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{flag} {path}: must end in .png, .pdf or .svg")


def report_assumed(name: str, checkpoint: "Checkpoint") -> None:
    """Prints in one line what a published system's file does not state and was assumed, and how to set it."""
    if checkpoint.assumed:
        from twinax.convert.file_layouts import describe_assumed

        print(f"twinax: {describe_assumed(name, checkpoint)}", file=sys.stderr)


def keep_compiled_programs() -> None:
    """Enable the cache of compiled programs; `import twinax` alone leaves JAX's settings as they are."""
    import_module("twinax.train.compilation_cache").use_compilation_cache()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What is wrong with files and settings, as our own errors say it, becomes the one line that a person sees."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{error.filename or 'a file'}: {error.strerror or error}") from None
    except ValueError as error:
        if not type(error).__module__.startswith("twinax."):
            raise
        raise UsageError(str(error)) from None
