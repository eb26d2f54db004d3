"""A whole checkpoint in one file: PyTorch's .pt, or .safetensors.

A .pt is a dict: `model` (a state dict), `config`, `layout`, `files` (of tokenizers) and, of a training, `optimizer` (a
state dict of `torch.optim`), `run`, `update`, `seed`, `position`. A .safetensors has the same in its metadata, and the
optimiser's arrays as `optimizer.exp_avg.NAME` and `optimizer.exp_avg_sq.NAME` beside the weights.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from ..configs.errors import ConversionError
from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from .arrays import to_torch_tensor
from .atomic_io import new_file
from .checkpoint import MOMENTS, Checkpoint, Training
from .file_layouts import (
    from_named,
    is_file_layout,
    is_published,
    layout_of,
    published_config,
    stated_settings,
    to_named,
)
from .files import read_safetensors, read_torch, to_arrays
from .optimizer import from_torch_optimizer, to_torch_optimizer

SUFFIXES = (".pt", ".pth", ".safetensors")  # in any case
_VERSION = 1
_MARK = "twinax_file_version"
_METADATA = "twinax"  # in a safetensors file's metadata, which is texts
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and Lightning
_WRAPPERS = ("model", "state_dict", "model_state_dict")  # where people put a state dict
_TORCH_HEADS = (b"PK\x03\x04", b"\x80")  # a zip archive; a pickle, before PyTorch 1.6


def has_suffix(path: Path) -> bool:
    """Whether the name is that of such a file."""
    return path.suffix.lower() in SUFFIXES


def write_file(checkpoint: Checkpoint, path: Path, layout: str) -> None:
    """Writes a new file, whole or not at all.

    Raises:
        ConversionError: the layout has no such model, the arrays are not the config's, the file exists, or the disk
            refuses.
    """
    model = to_named(checkpoint.arrays, checkpoint.config, layout, unused=checkpoint.unused)
    about = _describe(checkpoint, layout)
    if path.suffix.lower() == ".safetensors":
        _write_safetensors(checkpoint, path, model, about)
    else:
        _write_torch(checkpoint, path, model, about)


def read_file(path: Path, config: TransformerConfig | str | None = None) -> Checkpoint:
    """The checkpoint in a file. `config` is that of bare tensors, of a file that `write_file` did not write.

    In a published system's names, its config is read from the tensors, as published where none is given;
    `leftover:repaired,num_heads=4` asks for the repaired one with so many heads.

    Raises:
        ConversionError: the file is damaged, has no config, or its arrays are not the config's.
    """
    return read_parts(path).checkpoint(config)


def read_parts(path: Path) -> "Parts":
    """What a file holds. Raises: ConversionError where it is damaged, or no such file."""
    return Parts(path, _read_safetensors(path) if is_safetensors(path) else _read_torch(path))


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors, else of PyTorch: by its content, or by its name where that is damaged.

    Raises:
        ConversionError: it is neither.
    """
    with open(path, "rb") as file:
        head = file.read(9)
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return True
    if not head.startswith(_TORCH_HEADS) and not has_suffix(path):
        raise ConversionError(f"{path}: is no checkpoint: its content is neither PyTorch's nor that of safetensors")
    return not head.startswith(_TORCH_HEADS) and path.suffix.lower() == ".safetensors"


class Parts(NamedTuple):
    """What a file holds: `model`, arrays by the file's names, and where twinax wrote it the rest."""

    path: Path
    found: Mapping[str, Any]

    @property
    def bare(self) -> bool:
        """Whether it is tensors alone."""
        return _MARK not in self.found

    @property
    def layout(self) -> str:
        """Of its weights. Raises: ConversionError where it is none that twinax knows."""
        with self._named():
            found = layout_of(self.found["model"]) if self.bare else self.found["layout"]
            if not is_file_layout(found):
                raise ConversionError(f"layout={found!r}: there is no such layout of a file")
            return found

    def checkpoint(self, config: TransformerConfig | str | None = None) -> Checkpoint:
        """All of it. Raises: ConversionError where there is not one config, or the arrays are not the config's."""
        with self._named():
            if config is not None and not self.bare:
                raise ConversionError("has a config of its own; omit the other one")
            model, assumed = self.found["model"], ()
            if isinstance(config, str) or (config is None and self._published):
                config, assumed = published_config(model, self.layout, config, self.found.get("stated", {}))
            if config is None and self.bare:
                raise ConversionError(
                    f"holds {len(model)} bare tensors and no config; `twinax convert` with --config "
                    "makes a checkpoint of them; of a Hugging Face directory give the directory"
                )
            if config is None:
                return _whole(self.found, self.layout)
            system = self.layout.partition(":")[0] if self._published else None
            checkpoint = _bare(model, self.layout, config)
            return replace(checkpoint, system=system, assumed=assumed, skipped=self.found.get("skipped", ()))

    @property
    def _published(self) -> bool:
        """Whether it is bare tensors by a published system's names."""
        try:
            return self.bare and is_published(self.layout)
        except ConversionError:  # by nobody's names, as a Hugging Face file's
            return False

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever is wrong with what the file says is an error that names the file."""
        try:
            yield
        except ConversionError as error:
            raise ConversionError(str(error) if str(self.path) in str(error) else f"{self.path}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ConversionError(f"{self.path}: is not as twinax writes it: {reason}") from None


def _describe(checkpoint: Checkpoint, layout: str) -> dict[str, Any]:
    """What stands beside the arrays, as JSON has it."""
    about: dict[str, Any] = {_MARK: _VERSION, "layout": layout, "config": checkpoint.config.to_dict()}
    about |= {"system": checkpoint.system, "assumed": checkpoint.assumed}
    if checkpoint.layout is not None:
        documents = {name: dict(document) for name, document in checkpoint.documents.items()}
        about["source"] = {"layout": checkpoint.layout, "documents": documents}
    if (training := checkpoint.training) is not None:
        about |= {"run": training.run.to_dict(), "update": training.update, "seed": training.seed}
        about |= {"position": list(training.position), "optimizer_updates": training.count}
    return json.loads(json.dumps(about))  # tuples become lists, as they will be read


def _write_torch(checkpoint: Checkpoint, path: Path, model: Mapping[str, np.ndarray], about: dict[str, Any]) -> None:
    import torch

    tensors = {"model": model, "unused": checkpoint.unused}
    content = about | {part: {n: to_torch_tensor(a) for n, a in arrays.items()} for part, arrays in tensors.items()}
    content["files"] = dict(checkpoint.files)
    if checkpoint.training is not None:
        content["optimizer"] = to_torch_optimizer(checkpoint.training, checkpoint.to_torch())
    with new_file(path) as temporary:
        torch.save(content, temporary)


def _write_safetensors(
    checkpoint: Checkpoint, path: Path, model: Mapping[str, np.ndarray], about: dict[str, Any]
) -> None:
    arrays = {**model, **{f"unused.{name}": a for name, a in checkpoint.unused.items()}}
    for key in MOMENTS if checkpoint.training is not None else ():
        moments = to_named(getattr(checkpoint.training, key), checkpoint.config, about["layout"], trained_only=True)
        arrays |= {f"optimizer.{key}.{name}": a for name, a in moments.items()}
    files = {name: base64.b64encode(content).decode() for name, content in checkpoint.files.items()}
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with new_file(path) as temporary:
        metadata = {"format": "pt", _METADATA: json.dumps(about | {"files": files})}
        safetensors.numpy.save_file(whole, temporary, metadata=metadata)


def _read_torch(path: Path) -> dict[str, Any]:
    found = read_torch(path)
    if isinstance(found, dict) and _MARK in found:
        return found | {part: to_arrays(found.get(part), path) for part in ("model", "unused")}
    wrapper = next((n for n in _WRAPPERS if isinstance(found, dict) and isinstance(found.get(n), dict)), None)
    if wrapper is None:
        return {"model": _unwrapped(to_arrays(found, path))}
    arrays = _unwrapped(to_arrays(found[wrapper], path))
    stated = stated_settings(found.get("settings"), arrays)
    skipped = tuple(str(name) for name in found if name != wrapper and not (name == "settings" and stated))
    return {"model": arrays, "stated": stated, "skipped": skipped}


def _unwrapped(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without the first part of all names that somebody's wrapper put there."""
    for part in _PREFIXES:
        if arrays and all(name.startswith(part) for name in arrays):
            return _unwrapped({name.removeprefix(part): array for name, array in arrays.items()})
    return dict(arrays)


def _read_safetensors(path: Path) -> dict[str, Any]:
    arrays, texts = read_safetensors(path)
    if _METADATA not in texts:
        return {"model": _unwrapped(arrays)}
    try:
        found = json.loads(texts[_METADATA])
        found["files"] = {name: base64.b64decode(text) for name, text in found["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"{path}: its metadata are not as twinax writes them: {error}") from None
    for part in ("unused", *(f"optimizer.{key}" for key in MOMENTS)):
        names = [name for name in arrays if name.startswith(f"{part}.")]
        found[part] = {name.removeprefix(f"{part}."): arrays.pop(name) for name in names}
    return found | {"model": arrays}


def _bare(arrays: Mapping[str, np.ndarray], layout: str, config: TransformerConfig) -> Checkpoint:
    config = config.replace(param_dtype=str(next(iter(arrays.values())).dtype))
    ours, unused = from_named(arrays, config, layout)
    return Checkpoint(config, ours, unused=unused)


def _whole(found: Mapping[str, Any], layout: str) -> Checkpoint:
    if found[_MARK] != _VERSION:
        raise ConversionError(f"{_MARK}={found[_MARK]!r}: this twinax reads version {_VERSION}")
    config, source = TransformerConfig.from_dict(found["config"]), found.get("source") or {}
    arrays, unused = from_named(found["model"], config, layout)
    kept = source.get("layout"), source.get("documents", {}), found["unused"] | unused, found["files"]
    assumed = tuple(found.get("assumed", ()))
    checkpoint = Checkpoint(config, arrays, *kept, system=found.get("system"), assumed=assumed)
    return checkpoint if "run" not in found else _with_training(checkpoint, found, layout)


def _with_training(checkpoint: Checkpoint, found: Mapping[str, Any], layout: str) -> Checkpoint:
    run, (epoch, batch) = RunConfig.from_dict(found["run"]), found["position"]
    numbers = {"update": found["update"], "seed": found["seed"], "epoch": epoch, "batch": batch}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise ConversionError(f"{name}={value!r}: must be a number of at least 0")
    if "optimizer" in found:
        count, *moments = from_torch_optimizer(found["optimizer"], run, checkpoint.to_torch())
    else:
        named = (found[f"optimizer.{key}"] for key in MOMENTS)
        moments = [from_named(a, checkpoint.config, layout, trained_only=True)[0] for a in named]
        count = found["optimizer_updates"]
    training = Training(run, found["update"], found["seed"], (epoch, batch), count, *moments)
    return replace(checkpoint, training=training)
