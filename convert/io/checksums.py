"""Checksums that are stored with a checkpoint and compared when it is read.

A checksum is XXH3-128, of an array's dtype, shape and bytes in C order, or of a file's bytes. It finds damage, not
forgery. A .pt or .npz file without checksums has the CRC-32 of a zip archive.
"""

import json
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from ...backend.errors import ConversionError
from ...configs.verification import is_verifying
from ..arrays.lazy import contiguous_bytes

PLACEHOLDER = "0" * 32  # of the length of a checksum
_LENGTHS = 26  # place of the lengths of name and extra field, which end the local header of a zip entry
MAX_THREADS = 8  # more would read a file in too many places at once
Result = TypeVar("Result")
_REMEDY = "copy or convert it again, or read it with --no-verify"


def checksum_of(array: np.ndarray) -> str:
    """The checksum of an array, independent of its memory layout."""
    digest = xxhash.xxh3_128(f"{array.dtype} {list(array.shape)}\n".encode())
    digest.update(contiguous_bytes(array))
    return digest.hexdigest()


def checksum_of_json(values: Any) -> str:
    """The checksum of JSON values, independent of the order of keys."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def checksums_of_files(folder: Path) -> dict[str, str]:
    """The checksums of all files in a folder, by path within it."""
    return {name: _checksum_of_file(folder / name) for name in _files(folder)}


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]


def _checksum_of_file(path: Path) -> str:
    return xxhash.xxh3_128(path.read_bytes()).hexdigest()


def verify_arrays(arrays: Mapping[str, np.ndarray], expected: Any, path: Path) -> None:
    """Compare arrays with their checksums; `expected` is what the file has, None: nothing.

    Raises:
        ConversionError: an array is damaged, missing or new.
    """
    if expected is not None and is_verifying():
        checksums = _in_threads(lambda name: checksum_of(arrays[name]), arrays)
        verify_checksums(dict(zip(arrays, checksums, strict=True)), expected, path)


def verify_checksums(actual: Mapping[str, str], expected: Any, path: Path) -> None:
    """As `verify_arrays`, with the checksums of the arrays."""
    _check_mapping(expected, path)
    for name in sorted(actual.keys() | expected.keys()):
        if name not in actual or name not in expected:
            problem = "is missing" if name not in actual else "has no checksum"
            raise ConversionError(f"{path}: damaged or edited: {name} {problem}; {_REMEDY}")
        if actual[name] != expected[name]:
            raise ConversionError(f"{path}: damaged or edited: {name} does not match its checksum; {_REMEDY}")


def verify_files(folder: Path, checksums: Any) -> None:
    """Compare files with their checksums, by path within a folder; files without one are not read.

    Raises:
        ConversionError: a file is damaged or missing.
    """
    if checksums is None or not is_verifying():
        return
    _check_mapping(checksums, folder)
    present = {*_files(folder)}  # any other name may be no path of a file system, or one outside the folder
    for name, checksum in checksums.items():
        path = folder / name
        if name not in present:
            raise ConversionError(f"{path}: is missing; {_REMEDY}")
        if _checksum_of_file(path) != checksum:
            raise ConversionError(f"{path}: damaged or edited: does not match its checksum; {_REMEDY}")


def verify_json(values: Any, checksum: Any, path: Path) -> None:
    """Compare JSON values with their checksum. Raises: ConversionError if they differ."""
    if is_verifying() and checksum_of_json(values) != checksum:
        raise ConversionError(f"{path}: damaged or edited: its metadata do not match their checksum; {_REMEDY}")


def _in_threads(function: Callable[[Any], Result], values: Iterable[Any]) -> list[Result]:
    """Apply a function to each value in threads: hashing and reading of memory-mapped pages release the GIL."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as threads:
        return list(threads.map(function, values))


def _check_mapping(checksums: Any, path: Path) -> None:
    if not isinstance(checksums, Mapping) or not all(isinstance(c, str) for c in (*checksums, *checksums.values())):
        raise ConversionError(
            f"{path}: damaged or edited: its checksums are not a mapping from names to checksums; {_REMEDY}"
        )


def verify_zip(path: Path, *, pickles_only: bool = False) -> None:
    """Compare the uncompressed entries of a zip archive with their CRC-32; `pickles_only`: those of names in `.pkl`.

    Raises:
        ConversionError: an entry is damaged.
    """
    if not is_verifying():
        return
    try:
        damaged = _damaged_entry(path, ".pkl" if pickles_only else "")
    except (OSError, ValueError, struct.error, NotImplementedError, zipfile.BadZipFile) as error:
        raise ConversionError(f"{path}: damaged: its zip directory cannot be read: {error}; {_REMEDY}") from None
    if damaged is not None:
        raise ConversionError(f"{path}: damaged: {damaged} does not match its CRC-32; {_REMEDY}")


def _damaged_entry(path: Path, suffix: str) -> str | None:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = [entry for entry in archive.infolist() if entry.filename.endswith(suffix)]
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:

            def crc_of(entry: zipfile.ZipInfo) -> int:
                # Of the lengths in the local header, because those in the zip directory may differ from them.
                name, extra = struct.unpack_from("<HH", content, entry.header_offset + _LENGTHS)
                start = entry.header_offset + _LENGTHS + 4 + name + extra
                return zlib.crc32(content[start : start + entry.file_size])

            stored = [entry for entry in entries if entry.compress_type == zipfile.ZIP_STORED]
            sums = zip(stored, _in_threads(crc_of, stored), strict=True)
            return next((entry.filename for entry, crc in sums if crc != entry.CRC), None)
