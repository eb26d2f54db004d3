"""`model.bin` of CTranslate2: named arrays, and names that are aliases of others.

Source: `ctranslate2.specs.model_spec.ModelSpec._serialize`, binary version 6.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from ...backend.errors import ConversionError

_VERSION, _SPEC, _REVISION = 6, "TransformerSpec", 7
_NAMES = ("float32", "int8", "int16", "int32", "float16")
_DTYPES = (*(np.dtype(name) for name in _NAMES), np.dtype(ml_dtypes.bfloat16))  # by their number
_MAX_BYTES = 2**32 - 1  # of one array: their number has 4 bytes
_MAX_RANK = 8


def write_model(path: Path, variables: Mapping[str, np.ndarray], aliases: Mapping[str, str]) -> None:
    """Write a file of arrays and aliases, each in the order of names.

    Raises:
        ConversionError: an array is larger than the format allows.
    """
    with path.open("wb") as file:
        file.write(struct.pack("<I", _VERSION))
        _write_string(file, _SPEC)
        file.write(struct.pack("<II", _REVISION, len(variables)))
        for name, array in sorted(variables.items()):
            if (size := array.nbytes) > _MAX_BYTES:
                raise ConversionError(f"{name}: has {size:,} bytes, and CTranslate2 stores at most {_MAX_BYTES:,}")
            _write_string(file, name)
            file.write(struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape))
            file.write(struct.pack("<BI", _DTYPES.index(array.dtype), array.nbytes))
            file.write(np.ascontiguousarray(array).data if array.dtype != _DTYPES[-1] else array.tobytes())
        file.write(struct.pack("<I", len(aliases)))
        for alias, name in sorted(aliases.items()):
            _write_string(file, alias)
            _write_string(file, name)


def read_model(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, without aliases. Raises: ConversionError if it is damaged or of another version."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except (OSError, struct.error, ValueError, IndexError) as error:
        raise ConversionError(f"{path}: is damaged or of another version: {' '.join(str(error).split())}") from None


def _read(file: BinaryIO) -> dict[str, np.ndarray]:
    (version,), name, (revision, count) = _numbers(file, "I"), _read_string(file), _numbers(file, "II")
    if (version, name, revision) != (_VERSION, _SPEC, _REVISION):
        raise ValueError(f"holds {name[:40]!r}, revision {revision}, in version {version}")
    arrays = {}
    for _ in range(count):
        name = _read_string(file)
        (rank,) = _numbers(file, "B")
        if rank > _MAX_RANK:
            raise ValueError(f"{name[:80]}: has {rank} dimensions")
        shape = _numbers(file, f"{rank}I")
        number, size = _numbers(file, "BI")
        dtype = _DTYPES[number]
        if size != np.prod(shape, dtype=object) * dtype.itemsize:
            raise ValueError(f"{name[:80]}: has {size} bytes")
        arrays[name] = np.frombuffer(_read_bytes(file, size), dtype).reshape(shape)
    (count,) = _numbers(file, "I")
    aliases = {_read_string(file): _read_string(file) for _ in range(count)}
    if not {*aliases.values()} <= arrays.keys() or file.read(1):
        raise ValueError("its aliases are not at its end, or have no variable")
    return arrays


def _write_string(file: BinaryIO, text: str) -> None:
    file.write(struct.pack("<H", len(text) + 1) + text.encode() + b"\0")


def _read_string(file: BinaryIO) -> str:
    (length,) = _numbers(file, "H")
    return _read_bytes(file, length)[:-1].decode()


def _numbers(file: BinaryIO, types: str) -> tuple[int, ...]:
    return struct.unpack(f"<{types}", _read_bytes(file, struct.calcsize(f"<{types}")))


def _read_bytes(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError("it ends too early")
    return content
