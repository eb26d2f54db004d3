"""Safetensors files: memory-mapped when read, written one array at a time.

A file is the length of its header in 8 bytes, the header as JSON, and the arrays in C order, one after another.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from ...backend.errors import ConversionError
from ...configs.json_text import parse_json
from ..arrays.lazy import Spec, contiguous_bytes, lazy, specs_of
from .checksums import PLACEHOLDER, checksum_of, checksum_of_json, verify_arrays, verify_json
from .headers import safetensors_header
from .progress import advance

_ERRORS = (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError)
_DTYPES = {  # by the names of the format
    **{"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16"},
    **{"I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
}
_NUMPY = {**{name: np.dtype(dtype) for name, dtype in _DTYPES.items()}, "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {str(dtype): name for name, dtype in _NUMPY.items()}
_ALIGNMENT = 8  # of the first array, so that a reader can map it
_CHECKSUMS = "twinax_checksums"  # key in the metadata: checksums of the arrays by name, and of the other metadata


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays by name, metadata) of a file. The arrays are read-only views of it, which must stay as it is.

    Where twinax wrote the file, the arrays are compared with their checksums.

    Raises:
        ConversionError: the file is damaged, or has a dtype that numpy lacks.
    """
    metadata = read_safetensors_metadata(path)
    try:
        header = safetensors_header(path) or {}
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # reads further ahead, if the file is not in the page cache
        content = np.frombuffer(mapped, np.uint8)
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        arrays = {}
        for name in header.keys() - {"__metadata__"}:
            entry = header[name]
            if entry["dtype"] not in _NUMPY:
                raise ConversionError(f"{path}: {name} has dtype {entry['dtype']}, which numpy lacks")
            first, last = (start + offset for offset in entry["data_offsets"])
            arrays[name] = content[first:last].view(_NUMPY[entry["dtype"]]).reshape(entry["shape"])
    except _ERRORS as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{path}: not a complete safetensors file; download or copy it again ({error})") from None
    if (text := metadata.pop(_CHECKSUMS, None)) is not None:
        _verify(arrays, metadata, text, path)
    return dict(sorted(arrays.items())), metadata


def _verify(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], text: str, path: Path) -> None:
    """Compare arrays and metadata with their checksums. Raises: ConversionError if one differs."""
    try:
        checksums = parse_json(text)
        verify_json(metadata, checksums["metadata"], path)
        verify_arrays(arrays, checksums["arrays"], path)
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{path}: damaged: its checksums cannot be read: {error}") from None


def has_checksums(path: Path) -> bool:
    """Whether a file stores checksums of its arrays."""
    return _CHECKSUMS in ((safetensors_header(path) or {}).get("__metadata__") or {})


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file. Raises: ConversionError if it is damaged."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except _ERRORS as error:
        raise ConversionError(f"{path}: not a complete safetensors file; download or copy it again ({error})") from None


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays to a file, in the order of their names; each is computed and written before the next.

    Their checksums are filled in at the end.
    """
    specs = dict(sorted(specs_of(arrays).items()))
    checksums = dict.fromkeys(specs, PLACEHOLDER)
    with path.open("wb") as file:
        file.write(_head(specs, metadata, checksums))
        for name in specs:
            array = np.asarray(arrays[name], order="C")
            content = contiguous_bytes(array)
            file.write(content)
            checksums[name] = checksum_of(array)
            advance(len(content))
        file.seek(0)
        file.write(_head(specs, metadata, checksums))


def _head(specs: Mapping[str, Spec], metadata: Mapping[str, str], checksums: Mapping[str, str]) -> bytes:
    """The bytes before the arrays, as many with all checksums."""
    stored = {"arrays": checksums, "metadata": checksum_of_json(dict(metadata))}
    header: dict[str, object] = {"__metadata__": {**metadata, _CHECKSUMS: json.dumps(stored)}}
    position = 0
    for name, spec in specs.items():
        first, position = position, position + size_of(spec)
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [first, position]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_shards(
    folder: Path, stem: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], max_size: int
) -> None:
    """Write `stem-00001-of-00002.safetensors`, … of at most `max_size` bytes, and the index of their arrays.

    An array that is larger has a shard of its own. If everything fits into one file, that is `stem.safetensors`.
    """
    specs = dict(sorted(specs_of(arrays).items()))
    shards = list(_shards(specs, max_size))
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}.safetensors", arrays, metadata)
        return
    shard_of = {}
    for number, names in enumerate(shards, 1):
        shard = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / shard, lazy(arrays).select(names), metadata)
        shard_of |= dict.fromkeys(names, shard)
    sizes = {
        "total_parameters": sum(spec.size for spec in specs.values()),
        "total_size": sum(map(size_of, specs.values())),
    }
    index = json.dumps({"metadata": sizes, "weight_map": shard_of}, indent=2) + "\n"
    (folder / f"{stem}.safetensors.index.json").write_text(index, encoding="utf-8")


def size_of(spec: Spec) -> int:
    """The bytes of an array."""
    return spec.size * _NUMPY[_NAMES[spec.dtype]].itemsize


def _shards(specs: Mapping[str, Spec], max_size: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, spec in specs.items():
        if names and size + size_of(spec) > max_size:
            yield names
            names, size = [], 0
        names.append(name)
        size += size_of(spec)
    yield names
