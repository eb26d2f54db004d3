"""Reading of foreign weight files: safetensors, PyTorch, Flax; single or sharded, without executing their code."""

import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ...backend.torch_package import require_torch
from ...configs.json_text import parse_json
from ..arrays.frameworks import view_of_torch
from ..io.checksums import verify_zip
from ..io.headers import pickled_names, safetensors_header
from ..io.safetensors_files import has_checksums, read_safetensors, read_safetensors_metadata
from ..io.untrusted import check_declared_bytes
from . import legacy_flax
from .wrappers import state_dict_of

WEIGHTS = "model.safetensors"
CHECKSUMS = "checksums"  # key of the arrays' checksums in a .pt that twinax wrote
_INDEX = ".index.json"
_MAPPED = (".pt", ".pth", ".bin")  # by other suffixes, torch.load would choose another reader
# in the order in which `transformers` looks for them
FORMS = (WEIGHTS, "pytorch_model.bin", legacy_flax.WEIGHTS)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: ConversionError if the file is missing or holds no JSON object."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path.parent}: has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConversionError(f"{path}: is a JSON {type(values).__name__}, not an object")
    return values


def read_weights(directory: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """(all arrays of a directory, by their name in the PyTorch class, the names of ignored entries beside them).

    The arrays are views of the files if these can be mapped.

    Raises:
        ConversionError: there are no weights, a shard is missing, or a file is damaged or holds more than tensors.
    """
    path = _weights_of(directory)
    arrays, skipped = _read_shards(path) if path.name.endswith(_INDEX) else read_weights_file(path)
    return legacy_flax.to_torch_names(arrays) if _is_flax(path) else arrays, skipped


def has_flax_weights(directory: Path) -> bool:
    """Whether the weights of a directory were saved by a Flax class. Raises: ConversionError, as `read_weights`."""
    return _is_flax(_weights_of(directory))


def _weights_of(directory: Path) -> Path:
    """The file of a directory's weights, or the index of its shards."""
    paths = [directory / f"{form}{suffix}" for form in FORMS for suffix in ("", _INDEX)]
    path = next(filter(isfile, paths), None)
    if path is None:
        raise ConversionError(f"{directory}: has no weights; looked for {', '.join(FORMS)} and shards of them")
    return path


def weight_files(directory: Path) -> list[Path]:
    """The existing files that `read_weights` reads: one, or the shards of an index; empty if there are none."""
    try:
        path = _weights_of(directory)
        shard_of = read_json(path).get("weight_map") if path.name.endswith(_INDEX) else {"": path.name}
    except ConversionError:  # `read_weights` describes it
        return []
    values = shard_of.values() if isinstance(shard_of, dict) else ()
    names = {name for name in values if isinstance(name, str) and Path(name).name == name}
    return sorted(path.parent / name for name in names if isfile(path.parent / name))


def _is_flax(path: Path) -> bool:
    if path.name == WEIGHTS:
        return read_safetensors_metadata(path).get("format") == "flax"
    return path.name.startswith(legacy_flax.WEIGHTS)


def _read_shards(index: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    shard_of = read_json(index).get("weight_map")
    if not shard_of or not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
        raise ConversionError(f"{index}: has no weight_map from tensors to files")
    shards = sorted(set(shard_of.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ConversionError(f"{index}: names a file outside its directory: {outside[0]}")
    if missing := [shard for shard in shards if not isfile(index.parent / shard)]:
        names = ", ".join(missing[:3]) + (", …" if missing[3:] else "")
        raise ConversionError(f"{index.parent}: {len(missing)} of {len(shards)} shards missing: {names}")
    arrays: dict[str, np.ndarray] = {}
    skipped: dict[str, None] = {}
    for shard in shards:
        tensors, others = read_weights_file(index.parent / shard)
        skipped |= dict.fromkeys(others)
        names = {name for name, file in shard_of.items() if file == shard}
        if tensors.keys() != names:
            name = min(tensors.keys() ^ names)
            raise ConversionError(
                f"{index.parent / shard}: does not match {index.name}: {name} is in only one of the two"
            )
        arrays |= tensors
    return arrays, tuple(skipped)


def read_weights_file(path: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """(the arrays of a file, the names of ignored entries beside them). Raises: ConversionError, as `read_weights`."""
    skipped: tuple[str, ...] = ()
    if path.suffix == ".safetensors":
        arrays = read_safetensors(path)[0]
    elif path.suffix == ".msgpack":
        arrays = legacy_flax.read_msgpack(path)
    else:
        tensors, skipped = state_dict_of(read_torch(path))
        arrays = to_arrays(tensors, path)
    if not arrays:
        raise ConversionError(f"{path}: holds no tensors")
    return arrays, skipped


def read_torch(path: Path, advice: str = "save only the state dict") -> Any:
    """The content of a PyTorch file, on the CPU; executes none of its code. `advice`: what to do if it holds code.

    The entries of a zip archive are compared with their CRC-32; only the pickle if the file has `CHECKSUMS`.

    Raises:
        MissingPackageError: PyTorch is not installed.
        ConversionError: the file is damaged, reading it requires executing code, or its
            tensors are far larger than the file.
    """
    content = _load_torch(path, advice)
    check_declared_bytes(sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(content)))
    if zipfile.is_zipfile(path):
        verify_zip(path, pickles_only=isinstance(content, dict) and CHECKSUMS in content)
    return content


def protection_of(path: Path) -> str | None:
    """What the tensors in a file are compared with when it is read; None: nothing."""
    if safetensors_header(path) is not None:
        return "checksums" if has_checksums(path) else None
    if not zipfile.is_zipfile(path):
        return None
    return "checksums or CRC-32" if CHECKSUMS in pickled_names(path)[1] else "CRC-32"


def common_protection(paths: Sequence[Path]) -> str | None:
    """What all files are compared with; None: nothing, at least for one of them."""
    protections = {protection_of(path) for path in paths}
    return None if None in protections else " and ".join(sorted(filter(None, protections))) or None


def _load_torch(path: Path, advice: str) -> Any:
    require_torch(f"{path}: reading it")
    import pickle

    import torch

    try:
        # torch warns about TorchScript before raising. fairseq and jadore801120 store settings as a Namespace.
        # An open file, because for a path torch depends on its suffix.
        safe_globals = torch.serialization.safe_globals([Namespace])
        with warnings.catch_warnings(action="ignore"), safe_globals, open(path, "rb") as file:
            if zipfile.is_zipfile(path) and path.suffix.lower() in _MAPPED:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its message recommends executing the code
        name = re.search(r"GLOBAL (\S+)", str(error))
        if name is None:
            raise ConversionError(f"{path}: damaged, or holds more than tensors; none of its code was run") from None
        raise ConversionError(
            f"{path}: holds more than tensors, a {name[1]}; none of its code was run; {advice}"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        if "weights_only" in str(error):  # TorchScript, with the same recommendation
            raise ConversionError(f"{path}: holds more than tensors; none of its code was run") from None
        text = f"{type(error).__name__} {error}".splitlines()[0].partition(". ")[0][:200]
        reason = "" if isinstance(error, KeyError) else f" ({text})"  # the number of an entry that is not there
        raise ConversionError(f"{path}: not a complete PyTorch file; download or copy it again{reason}") from None


def _tensors_in(content: Any) -> Iterator[Any]:
    """All tensors in the dicts and lists of a file, including those of an optimizer."""
    import torch

    values, seen = [content], set()
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:  # a list may contain itself
            seen.add(id(value))
            values += value.values() if isinstance(value, dict) else value


def to_arrays(tensors: Any, path: Path) -> dict[str, np.ndarray]:
    """Views of the tensors of a state dict. Raises: ConversionError if it is none, or numpy lacks a dtype."""
    import torch

    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConversionError(f"{path}: is not a state dict, a mapping from names to tensors")
    arrays = {}
    for name, tensor in tensors.items():
        try:
            arrays[str(name)] = view_of_torch(tensor)
        except (TypeError, NotImplementedError, RuntimeError):
            kind = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
            raise ConversionError(f"{path}: {name} is {kind}, which numpy does not support") from None
    return arrays
