"""Directories of weights: reads safetensors and PyTorch files, whole or in shards; writes a directory or nothing."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os.path import isfile
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
    except (OSError, ValueError, RecursionError) as error:
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
        if isfile(directory / form):
            return _read_file(directory / form)
        if isfile(directory / f"{form}{_INDEX}"):
            return _read_shards(directory / f"{form}{_INDEX}")
    raise ConversionError(f"{directory}: has no weights; looked for {', '.join(_FORMS)} and shards of either")


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
        found = _read_file(index.parent / shard)
        wanted = {name for name, file in shard_of.items() if file == shard}
        if found.keys() != wanted:
            name = min(found.keys() ^ wanted)
            raise ConversionError(f"{index.parent / shard}: is not the shard of {index.name}: {name} is in one only")
        arrays |= found
    return arrays


def _read_file(path: Path) -> dict[str, np.ndarray]:
    arrays = read_safetensors(path)[0] if path.suffix == ".safetensors" else to_arrays(read_torch(path), path)
    if not arrays:
        raise ConversionError(f"{path}: holds no tensors")
    return arrays


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays by name, texts that stand beside them) of a file.

    Raises:
        ConversionError: the file is damaged, or of a number type that numpy does not have.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            texts = file.metadata() or {}
        return safetensors.numpy.load_file(path), texts
    except AttributeError:  # numpy.float8_…, which is not there
        raise ConversionError(f"{path}: holds tensors of a number type that numpy does not have") from None
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"{path}: not a whole safetensors file: {error}") from None


def read_torch(path: Path) -> Any:
    """What a PyTorch file holds, on the CPU; never runs code of it.

    Raises:
        ConversionError: there is no PyTorch, the file is damaged, or it needs code to be read.
    """
    import pickle

    try:
        import torch
    except ImportError:
        raise ConversionError(f"{path}: reading it needs PyTorch, which is not installed") from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its text advises to let the code run
        raise ConversionError(f"{path}: damaged, or holds more than tensors; none of its code was run") from None
    except Exception as error:  # a damaged file makes the reader fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConversionError(f"{path}: not a whole PyTorch file: {reason}") from None


def to_arrays(tensors: Any, path: Path) -> dict[str, np.ndarray]:
    """Arrays of a state dict, which is emptied. Raises: ConversionError where it is none, or numpy lacks a type."""
    import torch

    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConversionError(f"{path}: is no state dict, names with a tensor each")
    arrays = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        try:
            arrays[str(name)] = from_torch(tensor)
        except (TypeError, NotImplementedError, RuntimeError):
            kind = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
            raise ConversionError(f"{path}: {name} is {kind}, which numpy does not have") from None
    return arrays


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
    """Writes files by their path within a folder."""
    for name, content in files.items():
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


def check_new(path: Path) -> None:
    """Raises: ConversionError where something is there that would be overwritten."""
    path = path.resolve()  # a link to a directory stays one
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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(make(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


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
