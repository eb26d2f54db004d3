"""Checksums beside the state that orbax writes: of every array, and of the files in a checkpoint's folder `run`."""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from ...backend.errors import CheckpointError, ConversionError, DamagedCheckpointError
from ...configs.verification import is_verifying
from ...convert.io.checksums import checksum_of, checksums_of_files, verify_checksums, verify_files
from ...convert.weight_files.reading import read_json
from ...flax_transformer.module import on_host

CHECKSUMS = "checksums.json"


def checksums_of_arrays(tree: Any) -> dict[str, str]:
    """The checksums of all arrays in a tree, by path; in all processes of a run together."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): checksum_of(on_host(array)) for path, array in leaves}


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write checksums of arrays into the folder `run` of a checkpoint, with those of the files there."""
    document = {"arrays": checksums, "files": checksums_of_files(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, Any]:
    """The checksums in the folder `run` of a checkpoint, compared with the files there; empty if there are none.

    Raises:
        DamagedCheckpointError: they are damaged, or a file is.
        CheckpointError: this user may not read them, or a file.
    """
    if not (folder / CHECKSUMS).is_file():
        return {}
    try:
        checksums = read_json(folder / CHECKSUMS)
        verify_files(folder, checksums.get("files"))
    except (OSError, ConversionError) as error:
        check_permissions(folder)
        raise DamagedCheckpointError(str(error)) from None
    return checksums


def check_permissions(folder: Path) -> None:
    """Raises: CheckpointError if this user may not read a folder, or something in it: then it may be undamaged."""
    for path in (folder, *folder.rglob("*")):
        try:
            mode = os.R_OK | (os.X_OK if stat.S_ISDIR(os.stat(path).st_mode) else 0)
            may_read = os.access(path, mode)
        except OSError as error:
            may_read = error.errno != errno.EACCES  # else it is missing, or a link to what is
        if not may_read:
            raise CheckpointError(f"{path}: cannot be read: {os.strerror(errno.EACCES)}")


def verify_arrays(tree: Any, folder: Path) -> None:
    """Compare all arrays in a tree with the checksums of a checkpoint, if it has them.

    Raises:
        DamagedCheckpointError: an array is damaged, missing or new.
    """
    _verify(lambda: checksums_of_arrays(tree), read_checksums(folder / "run").get("arrays"), folder)


def verify_fields(fields: Mapping[str, Any], folder: Path) -> None:
    """As `verify_arrays`, for some fields of the saved tree alone, by name.

    Raises:
        DamagedCheckpointError: an array of these fields is damaged, missing or new.
    """

    def checksums() -> dict[str, str]:
        parts = {f".{field}": checksums_of_arrays(tree) for field, tree in fields.items()}
        return {field + name: checksum for field, part in parts.items() for name, checksum in part.items()}

    expected = read_checksums(folder / "run").get("arrays")
    if isinstance(expected, Mapping):
        prefixes = tuple(f".{field}[" for field in fields)
        expected = {name: value for name, value in expected.items() if name.startswith(prefixes)}
    _verify(checksums, expected, folder)


def _verify(checksums: Callable[[], dict[str, str]], expected: Any, folder: Path) -> None:
    if expected is None or not is_verifying():
        return
    try:
        verify_checksums(checksums(), expected, folder)
    except ConversionError as error:
        raise DamagedCheckpointError(str(error)) from None
