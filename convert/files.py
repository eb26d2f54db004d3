"""Directories of weights: reads safetensors and PyTorch files, whole or in shards; writes a directory or nothing."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from .arrays import from_torch
from .rules import ConversionError

WEIGHTS = "model.safetensors"
_INDEX = ".index.json"
_FORMS = (WEIGHTS, "pytorch_model.bin")  # in the order in which `transformers` looks for them


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: ConversionError where there is none, or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path.parent}: has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConversionError(f"{path}: is a JSON {type(values).__name__}, not an object")
    return values


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Every array of a directory, by name.

    Raises:
        ConversionError: no weights, a shard that is missing, a file that is damaged or holds more than tensors.
    """
    for form in _FORMS:
        if (directory / form).is_file():
            return _read_file(directory / form)
        if (directory / f"{form}{_INDEX}").is_file():
            return _read_shards(directory / f"{form}{_INDEX}")
    raise ConversionError(f"{directory}: has no weights; looked for {', '.join(_FORMS)} and shards of either")


def _read_shards(index: Path) -> dict[str, np.ndarray]:
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise ConversionError(f"{index}: has no weight_map from tensors to files")
    shards = sorted(set(shard_of.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ConversionError(f"{index}: names a file outside its directory: {outside[0]}")
    if missing := [shard for shard in shards if not (index.parent / shard).is_file()]:
        raise ConversionError(f"{index.parent}: {len(missing)} of {len(shards)} shards missing: {', '.join(missing)}")
    arrays: dict[str, np.ndarray] = {}
    for shard in shards:
        found = _read_file(index.parent / shard)
        wanted = {name for name, file in shard_of.items() if file == shard}
        if found.keys() != wanted:
            name = min(found.keys() ^ wanted)
            raise ConversionError(f"{index.parent / shard}: is not the shard of {index.name}: {name} is in one only")
        arrays |= found
    return arrays


def _read_file(path: Path) -> dict[str, np.ndarray]:
    arrays = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not arrays:
        raise ConversionError(f"{path}: holds no tensors")
    return arrays


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, OSError, KeyError, TypeError) as error:
        raise ConversionError(f"{path}: not a whole safetensors file: {error}") from None


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    import pickle

    try:
        import torch
    except ImportError:
        raise ConversionError(f"{path}: reading it needs PyTorch, which is not installed") from None
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise ConversionError(f"{path}: damaged, or holds more than tensors and would run code: {reason}") from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConversionError(f"{path}: not a whole PyTorch file: {str(error).splitlines()[0]}") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConversionError(f"{path}: is no state dict, names with a tensor each")
    return {str(name): from_torch(tensors.pop(name)) for name in list(tensors)}


def write_directory(directory: Path, arrays: Mapping[str, np.ndarray], documents: Mapping[str, Any]) -> None:
    """A new directory of `model.safetensors` and JSON documents by file name: there whole, or not at all.

    Raises:
        ConversionError: something is there already, or the disk refuses.
    """
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise ConversionError(f"{directory}: exists and is not empty; give another name, or remove it")
    temporary = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        safetensors.numpy.save_file(whole, temporary / WEIGHTS, metadata={"format": "pt"})
        for name, document in documents.items():
            (temporary / name).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(directory)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConversionError(f"{directory}: cannot be written: {error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
