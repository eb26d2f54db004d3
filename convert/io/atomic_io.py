"""Atomic writing of files and directories: complete and synced to disk, or absent.

Only `replace_file` and `replaced_file` overwrite.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from .safetensors_files import write_shards

_MARK = ".twinax-"  # in the names of temporary files and directories
_ATTEMPTS, _PAUSE = 20, 0.05  # for the lock on a directory, which others hold for milliseconds; seconds

_check: ContextVar[tuple[Path, Callable[[Path], None]] | None] = ContextVar("check", default=None)


@contextmanager
def checked_before_renaming(path: Path, check: Callable[[Path], None]) -> Iterator[None]:
    """Within the context, `check` is called with the temporary file or directory that is renamed to `path`.

    It is complete and synced then. `check` may add files to a directory; if it raises, nothing is left at `path`.
    """
    token = _check.set((path.resolve(), check))
    try:
        yield
    finally:
        _check.reset(token)


def write_directory(
    directory: Path,
    arrays: Mapping[str, np.ndarray],
    documents: Mapping[str, Any],
    files: Mapping[str, bytes],
    max_shard_size: int,
) -> None:
    """Atomically write a new directory of `model.safetensors` or its shards, JSON documents and other files by name.

    Raises:
        ConversionError: the path exists and is not an empty directory, or writing fails.
    """
    with new_directory(directory) as folder:
        write_shards(folder, "model", arrays, {"format": "pt"}, max_shard_size)
        for name, document in documents.items():
            (folder / name).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_files(folder, files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to their paths within a folder. Raises: ConversionError if a path leads outside of it."""
    for name, content in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConversionError(f"{name}: is not a path within a checkpoint")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A temporary folder to write into, which is synced and renamed to `directory` at the end.

    Raises:
        ConversionError: the path exists and is not an empty directory, or writing fails; no files are left behind.
    """
    check_new(directory)
    with _one_line(directory), _temporary(directory, tempfile.mkdtemp) as folder:
        yield folder
        _sync_tree(folder)
        if _checked(directory, folder):
            _sync_tree(folder)
        folder.chmod(0o777 & ~_umask())
        folder.rename(directory.resolve())  # fails if another process has filled the directory meanwhile
        _sync(directory.resolve().parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file to write to, which is synced and renamed to `path` at the end.

    Raises:
        ConversionError: the path exists, or writing fails; no files are left behind.
    """
    check_new_file(path)
    with _one_line(path), _temporary(path, _make_file) as temporary:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        _checked(path, temporary)
        try:
            os.link(temporary, path.resolve())  # unlike a rename, it never overwrites another process's file
        except FileExistsError:
            check_new(path)
            raise
        except OSError:  # a file system without hard links
            check_new(path)
            temporary.rename(path.resolve())
        _sync(path.resolve().parent)


def replace_file(path: Path, text: str) -> None:
    """Atomically replace a file's content with a text, synced to disk.

    A device or a pipe is written to, and a file in a folder where this user may make none.
    """
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        path.write_text(text, encoding="utf-8")
        return
    with replaced_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary file to write to, which is synced and renamed to `path` at the end, whatever was there."""
    path = path.resolve()  # a symbolic link is kept
    mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
    with _temporary(path, _make_file) as temporary:
        yield temporary
        _sync(temporary)
        temporary.chmod(mode & 0o777)
        temporary.replace(path)


def is_temporary(path: Path) -> bool:
    """Whether an interrupted writing of this module left a path."""
    return path.name.startswith(".") and _MARK in path.name


def check_new(path: Path) -> None:
    """Raises: ConversionError if writing to the path would overwrite something."""
    try:
        path = path.resolve()  # write to the target of a symbolic link, and keep the link
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links
        raise ConversionError(f"{path}: cannot be written: {error}") from None
    if path == Path.cwd():
        raise ConversionError(f"{path}: is the current directory; give a new name")
    if path.is_dir() and any(path.iterdir()):
        raise ConversionError(f"{path}: exists and is not empty; give another name, or remove it")
    if path.exists() and not path.is_dir():
        raise ConversionError(f"{path}: exists; give another name, or remove it")


def check_new_file(path: Path) -> None:
    """Raises: ConversionError, as `check_new`; or the path of a file is a directory."""
    check_new(path)
    if path.is_dir():
        raise ConversionError(f"{path}: is a directory; give the name of a file, or remove it")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Convert every exception while writing to a one-line ConversionError."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConversionError(f"{path}: cannot be written: {reason}") from None


@contextmanager
def _temporary(path: Path, make: Callable[..., str]) -> Iterator[Path]:
    """A temporary path beside `path`; removed at the end if it still exists.

    It is locked while its process lives, so that the next one to write there removes what a killed one left.
    """
    path = path.resolve()
    new_parents = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name[:50]}{_MARK}"  # a name of any length may be written
    with _locked(path.parent, _ATTEMPTS) as alone:
        for leftover in path.parent.glob(f".*{_MARK}*") if alone else ():
            with _locked(leftover) as free:
                if free:
                    _remove(leftover)
        temporary = Path(make(prefix=prefix, suffix=path.suffix[:20], dir=path.parent))  # readers look at the suffix
        lock = _lock(temporary)
    try:
        yield temporary
    finally:
        _remove(temporary)
        if lock is not None:
            os.close(lock)
        for parent in new_parents:  # deepest first; after a failure they are empty and are removed too
            if not any(parent.iterdir()):
                parent.rmdir()


def _make_file(**names: Any) -> str:
    """The path of a new file; as `tempfile.mkdtemp` for a directory."""
    descriptor, name = tempfile.mkstemp(**names)
    os.close(descriptor)
    return name


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, attempts: int = 1) -> Iterator[bool]:
    """Hold the lock on a file or directory; yield False if another process has it, or there are no locks here."""
    descriptor = _lock(path, attempts)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path, attempts: int = 1) -> int | None:
    """A descriptor that holds the lock on a path until it is closed, None if that is not possible."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    except OSError:
        return None
    for attempt in range(attempts):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:  # held by another
            time.sleep(_PAUSE if attempt + 1 < attempts else 0)
        except OSError:  # a file system without locks
            break
    os.close(descriptor)
    return None


def _checked(path: Path, temporary: Path) -> bool:
    """Call the check of this path, if one is set; return whether there was one."""
    if (entry := _check.get()) is None or entry[0] != path.resolve():
        return False
    entry[1](temporary)
    return True


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


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
