"""New files and directories: there whole and on the disk, or not at all, and never in place of others."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from ..configs.errors import ConversionError
from .files import WEIGHTS


def write_directory(
    directory: Path, arrays: Mapping[str, np.ndarray], documents: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    """A new directory of `model.safetensors`, JSON documents and other files by name: there whole, or not at all.

    Raises:
        ConversionError: something is there already, or the disk refuses.
    """
    with new_directory(directory) as folder:
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        safetensors.numpy.save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
        for name, document in documents.items():
            (folder / name).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_files(folder, files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by their path within a folder. Raises: ConversionError where one is not within it."""
    for name, content in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConversionError(f"{name}: is no path within a checkpoint")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A folder to write into, which becomes that directory when all is written and on the disk.

    Raises:
        ConversionError: something is there already, or the disk refuses; nothing is left behind then.
    """
    with _one_line(directory), _temporary(directory, tempfile.mkdtemp) as folder:
        yield folder
        for path in sorted(folder.rglob("*")):
            _sync(path)
        _sync(folder)
        folder.chmod(0o777 & ~_umask())
        folder.rename(directory.resolve())  # refuses a directory that has something in it by now
        _sync(directory.resolve().parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write, which gets that name when all is written and on the disk.

    Raises:
        ConversionError: something is there already, or the disk refuses; nothing is left behind then.
    """

    def make(prefix: str, dir: Path) -> str:
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=dir)
        os.close(descriptor)
        return name

    with _one_line(path), _temporary(path, make) as temporary:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        try:
            os.link(temporary, path.resolve())  # unlike a rename, it never replaces what another process has written
        except FileExistsError:
            check_new(path)
            raise
        except OSError:  # a file system without links
            check_new(path)
            temporary.rename(path.resolve())
        _sync(path.resolve().parent)


def replace_file(path: Path, text: str) -> None:
    """Puts a text in place of a file, as a whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def check_new(path: Path) -> None:
    """Raises: ConversionError where something is there that would be overwritten."""
    try:
        path = path.resolve()  # a link to a directory stays one
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links
        raise ConversionError(f"{path}: cannot be written: {error}") from None
    if path == Path.cwd():
        raise ConversionError(f"{path}: is the current directory; give the name of a new one")
    if path.is_dir() and any(path.iterdir()):
        raise ConversionError(f"{path}: exists and is not empty; give another name, or remove it")
    if path.exists() and not path.is_dir():
        raise ConversionError(f"{path}: exists; give another name, or remove it")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Whatever a disk, PyTorch, safetensors or orbax raise while they write becomes a ConversionError."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConversionError(f"{path}: cannot be written: {reason}") from None


@contextmanager
def _temporary(path: Path, make: Callable[..., str]) -> Iterator[Path]:
    """A path beside another; what is left of it at the end is removed."""
    check_new(path)
    path = path.resolve()
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(make(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        for parent in made:  # the deepest first; of a failure nothing stays
            if not any(parent.iterdir()):
                parent.rmdir()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
