"""Reading of foreign weight files: safetensors, PyTorch, Flax; single or sharded, without executing their code."""

import json
import re
import warnings
from argparse import Namespace
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ..configs.errors import ConversionError
from . import legacy_flax
from .arrays import from_torch

WEIGHTS = "model.safetensors"
_INDEX = ".index.json"
# in the order in which `transformers` looks for them
FORMS = (WEIGHTS, "pytorch_model.bin", legacy_flax.WEIGHTS)
_SAFETENSORS_ERRORS = (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: ConversionError if the file is missing or holds no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path.parent}: has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConversionError(f"{path}: is a JSON {type(values).__name__}, not an object")
    return values


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of a directory, by their name in the PyTorch class.

    Raises:
        ConversionError: there are no weights, a shard is missing, or a file is damaged or holds more than tensors.
    """
    path = _weights_of(directory)
    arrays = _read_shards(path) if path.name.endswith(_INDEX) else _read_file(path)
    return legacy_flax.to_torch_names(arrays) if _is_flax(path) else arrays


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


def _is_flax(path: Path) -> bool:
    if path.name == WEIGHTS:
        return read_safetensors_metadata(path).get("format") == "flax"
    return path.name.startswith(legacy_flax.WEIGHTS)


def _read_shards(index: Path) -> dict[str, np.ndarray]:
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
    for shard in shards:
        tensors = _read_file(index.parent / shard)
        names = {name for name, file in shard_of.items() if file == shard}
        if tensors.keys() != names:
            name = min(tensors.keys() ^ names)
            raise ConversionError(
                f"{index.parent / shard}: does not match {index.name}: {name} is in only one of the two"
            )
        arrays |= tensors
    return arrays


def _read_file(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".safetensors":
        arrays = read_safetensors(path)[0]
    elif path.suffix == ".msgpack":
        arrays = legacy_flax.read_msgpack(path)
    else:
        arrays = to_arrays(read_torch(path), path)
    if not arrays:
        raise ConversionError(f"{path}: holds no tensors")
    return arrays


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays by name, metadata) of a file.

    Raises:
        ConversionError: the file is damaged, or has a dtype that numpy lacks.
    """
    metadata = read_safetensors_metadata(path)
    try:
        return safetensors.numpy.load_file(path), metadata
    except AttributeError:  # numpy.float8_…, which numpy lacks
        raise ConversionError(f"{path}: holds tensors of a dtype that numpy lacks") from None
    except _SAFETENSORS_ERRORS as error:
        raise ConversionError(f"{path}: not a complete safetensors file: {error}") from None


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file. Raises: ConversionError if it is damaged."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except _SAFETENSORS_ERRORS as error:
        raise ConversionError(f"{path}: not a complete safetensors file: {error}") from None


def read_torch(path: Path, advice: str = "save only the state dict") -> Any:
    """The content of a PyTorch file, on the CPU; executes none of its code. `advice`: what to do if it holds code.

    Raises:
        ConversionError: PyTorch is not installed, the file is damaged, or reading it requires executing code.
    """
    import pickle

    try:
        import torch
    except ImportError:
        raise ConversionError(f"{path}: reading it needs PyTorch, which is not installed") from None
    try:
        # torch warns about TorchScript before raising. fairseq and jadore801120 store settings as a Namespace.
        # An open file, because for a path torch depends on its suffix.
        safe_globals = torch.serialization.safe_globals([Namespace])
        with warnings.catch_warnings(action="ignore"), safe_globals, open(path, "rb") as file:
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
        reason = f"{type(error).__name__} {error}".splitlines()[0].partition(". ")[0][:200]
        raise ConversionError(f"{path}: not a complete PyTorch file; download or copy it again ({reason})") from None


def to_arrays(tensors: Any, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a state dict, which is emptied. Raises: ConversionError if it is none, or numpy lacks a dtype."""
    import torch

    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConversionError(f"{path}: is not a state dict, a mapping from names to tensors")
    arrays = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        try:
            arrays[str(name)] = from_torch(tensor)
        except (TypeError, NotImplementedError, RuntimeError):
            kind = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
            raise ConversionError(f"{path}: {name} is {kind}, which numpy does not support") from None
    return arrays
