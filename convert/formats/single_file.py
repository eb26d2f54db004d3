"""A complete checkpoint in one file: PyTorch's .pt, or .safetensors.

A .pt file is a dict with `model` (a state dict), `unused`, `config`, `layout`, `system`, `assumed`, `source`, `files`
(of tokenizers), `checksums` and, for a training, `optimizer` (a state dict of `torch.optim`), `optimizer_updates`,
`run`, `update`, `seed` and `position`. A .safetensors file has the other entries as JSON in its metadata, and arrays as
NAME, `unused.NAME`, `optimizer.exp_avg.NAME` and `optimizer.exp_avg_sq.NAME`.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...backend.errors import ConversionError
from ...backend.torch_package import require_torch
from ...configs.json_text import parse_json
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ..arrays.frameworks import torch_view
from ..arrays.lazy import lazy
from ..checkpoint import MOMENTS, Checkpoint, Training
from ..io.atomic_io import new_file
from ..io.checksums import checksum_of, verify_arrays, verify_zip
from ..io.safetensors_files import read_safetensors, write_safetensors
from ..io.untrusted import reading
from ..optimizers.adam import from_torch_optimizer, to_torch_optimizer
from ..optimizers.user_optimizer import moments_of_entry, optimizer_entry, with_user_optimizer
from ..weight_files.reading import CHECKSUMS, read_torch, to_arrays
from ..weight_files.wrappers import state_dict_of, unwrap
from .file_layouts import (
    from_named,
    is_file_layout,
    is_published,
    layout_of,
    published_config,
    stated_settings,
    to_named,
)

TORCH_SUFFIXES = (".pt", ".pth")
SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")  # case-insensitive
_VERSION = 1
_MARK = "twinax_file_version"
_METADATA = "twinax"  # key in a safetensors file's metadata, whose values are strings
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim")  # usual keys of an optimizer's state dict beside it
_TORCH_HEADS = (b"PK\x03\x04", b"\x80")  # a zip archive; a pickle, before PyTorch 1.6


def has_suffix(path: Path) -> bool:
    """Whether a path has one of these suffixes."""
    return path.suffix.lower() in SUFFIXES


def write_file(checkpoint: Checkpoint, path: Path, layout: str) -> None:
    """Atomically write a new file.

    Raises:
        ConversionError: the layout has no such model, the arrays are not the config's, the file exists, or writing
            fails.
    """
    model = to_named(checkpoint.arrays, checkpoint.config, layout, unused=checkpoint.unused)
    metadata = _describe(checkpoint, layout)
    if path.suffix.lower() == ".safetensors":
        _write_safetensors(checkpoint, path, model, metadata)
    else:
        _write_torch(checkpoint, path, model, metadata)


def read_file(path: Path, config: TransformerConfig | str | None = None) -> Checkpoint:
    """The checkpoint in a file. `config` is the config of bare tensors, in a file that `write_file` did not write.

    For a published system, the config is inferred from the tensors, by default as published;
    `leftover:repaired,num_heads=4` selects the repaired variant with 4 heads.

    Raises:
        ConversionError: the file is damaged, has no config, or its arrays are not the config's.
    """
    return read_parts(path).checkpoint(config)


def read_training(path: Path, config: TransformerConfig | str | None, run: RunConfig) -> Checkpoint:
    """The checkpoint in a file of a user's own model and AdamW, with the state that a run resumes from.

    Raises:
        ConversionError: as `read_file`; or there is no optimizer, or it is not that of the run.
    """
    parts = read_parts(path)
    if not parts.bare:
        raise ConversionError(f"{path}: twinax wrote it, with its own run if any; omit the other one")
    if parts.content.get("optimizer") is None:
        raise ConversionError(f"{path}: has no optimizer; looked for {', '.join(OPTIMIZERS)} beside the state dict")
    checkpoint = parts.checkpoint(run.model if config is None else config)
    with _file_errors(path):
        return with_user_optimizer(checkpoint, parts.content["model"], parts.layout, parts.content["optimizer"], run)


def read_parts(path: Path) -> "Parts":
    """The content of a file. Raises: ConversionError if the file is missing or damaged."""
    with _file_errors(path), reading(path):
        return Parts(path, _read_safetensors(path) if is_safetensors(path) else _read_torch(path))


def is_safetensors(path: Path) -> bool:
    """Whether a file is a safetensors file, not a PyTorch file: by its content, or by its name if it is damaged."""
    with open(path, "rb") as file:
        head = file.read(9)
    named = path.suffix.lower() == ".safetensors"
    # Of a truncated file, the header can be longer than the file, and its length can begin like a pickle.
    if head[8:] == b"{" and (named or int.from_bytes(head[:8], "little") < path.stat().st_size):
        return True
    return not head.startswith(_TORCH_HEADS) and named


def is_torch(path: Path) -> bool:
    """Whether a file is a PyTorch file: by its content, or by its name if it is damaged."""
    with open(path, "rb") as file:
        return file.read(4).startswith(_TORCH_HEADS) or (has_suffix(path) and not is_safetensors(path))


class Parts(NamedTuple):
    """The content of a file: `model`, arrays by the file's names, and twinax's metadata if it wrote the file."""

    path: Path
    content: Mapping[str, Any]

    @property
    def bare(self) -> bool:
        """Whether the file holds tensors only."""
        return _MARK not in self.content

    @property
    def layout(self) -> str:
        """The layout of the weights. Raises: ConversionError if twinax does not support it."""
        with _file_errors(self.path):
            layout = layout_of(self.content["model"]) if self.bare else self.content["layout"]
            if not is_file_layout(layout):
                raise ConversionError(f"layout={layout!r}: there is no such layout of a file")
            return layout

    def checkpoint(self, config: TransformerConfig | str | None = None) -> Checkpoint:
        """The checkpoint. Raises: ConversionError if there is not exactly one config, or the arrays do not fit it."""
        with _file_errors(self.path), reading(self.path):
            if config is not None and not self.bare:
                raise ConversionError("has its own config; omit the other one")
            model, assumed = self.content["model"], ()
            if isinstance(config, str) or (config is None and self._is_published):
                config, assumed = published_config(model, self.layout, config, self.content.get("stated", {}))
            if config is None and self.bare:
                raise ConversionError(
                    f"holds {len(model)} bare tensors and no config; convert them with `twinax convert --config`, or "
                    "give the directory of a Hugging Face checkpoint"
                )
            if config is None:
                return _twinax_checkpoint(self.content, self.layout)
            system = self.layout.partition(":")[0] if self._is_published else None
            checkpoint = _bare_checkpoint(model, self.layout, config)
            notes = {name: self.content.get(name, ()) for name in ("skipped", "stripped")}
            return replace(checkpoint, system=system, assumed=assumed, **notes)

    @property
    def _is_published(self) -> bool:
        """Whether the file holds bare tensors with a published system's names."""
        try:
            return self.bare and is_published(self.layout)
        except ConversionError:  # unknown names, as in a Hugging Face file
            return False


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Convert exceptions caused by the file's content to ConversionErrors that name the file."""
    try:
        yield
    except ConversionError as error:
        raise ConversionError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConversionError(f"{path}: is not in twinax's format: {reason}") from None


def _describe(checkpoint: Checkpoint, layout: str) -> dict[str, Any]:
    """The metadata beside the arrays, as JSON values."""
    metadata: dict[str, Any] = {_MARK: _VERSION, "layout": layout, "config": checkpoint.config.to_dict()}
    metadata |= {"system": checkpoint.system, "assumed": checkpoint.assumed}
    if checkpoint.layout is not None:
        documents = {name: dict(document) for name, document in checkpoint.documents.items()}
        metadata["source"] = {"layout": checkpoint.layout, "documents": documents}
    if (training := checkpoint.training) is not None:
        metadata |= {"run": training.run.to_dict(), "update": training.update, "seed": training.seed}
        metadata |= {"position": list(training.position), "optimizer_updates": training.count}
    return json.loads(json.dumps(metadata))  # tuples become lists, as after reading


def _write_torch(checkpoint: Checkpoint, path: Path, model: Mapping[str, np.ndarray], metadata: dict[str, Any]) -> None:
    require_torch(f"{path}: writing it")
    import torch

    tensors = {"model": model, "unused": checkpoint.unused}
    content = metadata | {part: {n: torch_view(a) for n, a in arrays.items()} for part, arrays in tensors.items()}
    content["files"] = dict(checkpoint.files)
    if checkpoint.training is not None:
        if metadata["layout"] == "twinax":
            content["optimizer"] = to_torch_optimizer(checkpoint.training, checkpoint.to_torch())
        else:
            content["optimizer"] = optimizer_entry(checkpoint.training, checkpoint.config, metadata["layout"])
    content[CHECKSUMS] = {name: checksum_of(array) for name, array in _arrays_of(content, path).items()}
    # An open file, because for a path its name would be in the archive.
    with new_file(path) as temporary, temporary.open("wb") as file:
        torch.save(content, file)


def _write_safetensors(
    checkpoint: Checkpoint, path: Path, model: Mapping[str, np.ndarray], metadata: dict[str, Any]
) -> None:
    arrays = lazy(model) | lazy(checkpoint.unused).with_prefix("unused.")
    for key in MOMENTS if checkpoint.training is not None else ():
        moments = to_named(getattr(checkpoint.training, key), checkpoint.config, metadata["layout"], trained_only=True)
        arrays |= lazy(moments).with_prefix(f"optimizer.{key}.")
    files = {name: base64.b64encode(content).decode() for name, content in checkpoint.files.items()}
    with new_file(path) as temporary:
        texts = {"format": "pt", _METADATA: json.dumps(metadata | {"files": files})}
        write_safetensors(temporary, arrays, texts)


def _read_torch(path: Path) -> dict[str, Any]:
    content = read_torch(path)
    if isinstance(content, dict) and _MARK in content:
        try:
            verify_arrays(_arrays_of(content, path), content.get(CHECKSUMS), path)
        except ConversionError:  # damaged, or trained on in PyTorch and saved again: then the archive is not damaged
            verify_zip(path)
        return content | {part: to_arrays(content.get(part), path) for part in ("model", "unused")}
    state, others = state_dict_of(content)
    arrays, stripped = unwrap(to_arrays(state, path))
    fields = stated_settings(content.get("settings"), arrays) if others else {}
    skipped = tuple(name for name in others if not (name == "settings" and fields))
    optimizer = next((content[name] for name in OPTIMIZERS if name in others), None)
    return {"model": arrays, "stated": fields, "skipped": skipped, "stripped": stripped, "optimizer": optimizer}


def _arrays_of(content: Mapping[str, Any], path: Path) -> dict[str, np.ndarray]:
    """All tensors of a .pt that twinax wrote; the optimizer's by number of parameter and name."""
    parts = {part: content.get(part, {}) for part in ("model", "unused")}
    if content.get("optimizer") is not None:
        parts |= {f"optimizer.{i}": state for i, state in content["optimizer"]["state"].items()}
    return {f"{part}.{n}": array for part, tensors in parts.items() for n, array in to_arrays(tensors, path).items()}


def _read_safetensors(path: Path) -> dict[str, Any]:
    arrays, texts = read_safetensors(path)
    if _METADATA not in texts:
        return dict(zip(("model", "stripped"), unwrap(arrays), strict=True))
    try:
        content = parse_json(texts[_METADATA])
        content["files"] = {name: base64.b64decode(text) for name, text in content["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: its metadata are not in twinax's format: {error}") from None
    for part in ("unused", *(f"optimizer.{key}" for key in MOMENTS)):
        names = [name for name in arrays if name.startswith(f"{part}.")]
        content[part] = {name.removeprefix(f"{part}."): arrays.pop(name) for name in names}
    return content | {"model": arrays}


def _bare_checkpoint(tensors: Mapping[str, np.ndarray], layout: str, config: TransformerConfig) -> Checkpoint:
    config = config.replace(param_dtype=str(next(iter(tensors.values())).dtype))
    arrays, unused = from_named(tensors, config, layout)
    return Checkpoint(config, arrays, unused=unused)


def _twinax_checkpoint(content: Mapping[str, Any], layout: str) -> Checkpoint:
    if content[_MARK] != _VERSION:
        raise ConversionError(f"{_MARK}={content[_MARK]!r}: this twinax reads version {_VERSION}")
    config, source = TransformerConfig.from_dict(content["config"]), content.get("source") or {}
    arrays, unused = from_named(content["model"], config, layout)
    checkpoint = Checkpoint(
        config,
        arrays,
        layout=source.get("layout"),
        documents=source.get("documents", {}),
        unused=content["unused"] | unused,
        files=content["files"],
        system=content.get("system"),
        assumed=tuple(content.get("assumed", ())),
    )
    return checkpoint if "run" not in content else _with_training(checkpoint, content, layout)


def _with_training(checkpoint: Checkpoint, content: Mapping[str, Any], layout: str) -> Checkpoint:
    run, (epoch, batch) = RunConfig.from_dict(content["run"]), content["position"]
    numbers = {"update": content["update"], "seed": content["seed"], "epoch": epoch, "batch": batch}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise ConversionError(f"{name}={value!r}: must be an integer of at least 0")
    if "optimizer" in content and layout != "twinax":
        count, *moments = moments_of_entry(content["optimizer"], checkpoint.config, layout)
    elif "optimizer" in content:
        count, *moments = from_torch_optimizer(content["optimizer"], run, checkpoint.to_torch())
    else:
        arrays = (content[f"optimizer.{key}"] for key in MOMENTS)
        moments = [from_named(a, checkpoint.config, layout, trained_only=True)[0] for a in arrays]
        count = content["optimizer_updates"]
    training = Training(run, content["update"], content["seed"], (epoch, batch), count, *moments)
    return replace(checkpoint, training=training)
