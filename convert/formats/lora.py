"""LoRA adapters of `peft`: read from their directory and merged into a family's weights, as `merge_and_unload` does.

An adapter of rank r changes a weight W (out, in) to W + s · B·A, with A (r, in), B (out, r), s = alpha / r, or
alpha / sqrt(r) with `use_rslora`. DoRA rescales each row of the sum to a learned magnitude. For an embedding (V, D), A
is (r, V), B is (D, r), and the transpose of B·A is added.

Source: Hu et al. 2021, "LoRA"; Kalajdzievski 2023, "rsLoRA"; Liu et al. 2024, "DoRA"; `peft.tuners.lora`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backend.errors import ConversionError
from ...backend.torch_package import require_torch
from ..arrays.frameworks import from_torch, to_torch_tensor
from ..identify.unreadable import printable
from ..layouts.hugging_face import Family
from ..weight_files.reading import read_json, read_safetensors, read_torch, to_arrays
from .lora_settings import CONFIG, check_settings, is_target, names_of, value_for

if TYPE_CHECKING:
    from torch import Tensor

Arrays = Mapping[str, np.ndarray]
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_LINEAR, _EMBEDDING = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
_BIAS, _LENGTHS = "lora_B.bias", "lora_magnitude_vector"
_PARTS = (*_LINEAR, *_EMBEDDING, _BIAS, _LENGTHS)
_PART = re.compile(rf"(.+)\.({'|'.join(map(re.escape, _PARTS))})(\.weight)?")
_WHOLE, _ORIGINAL = ".modules_to_save.", ".original_module."  # the trained copy of a module, and the base's
_TOKENS = ".token_adapter.trainable_tokens_delta"
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Adapter:
    """An adapter: its settings and tensors; modules and arrays have the names of the base model's class."""

    directory: Path
    settings: Mapping[str, Any]
    changes: Mapping[str, Arrays]  # module -> parts of its low-rank update
    replacements: Arrays  # arrays that were trained whole: those of modules_to_save, and biases
    tokens: Arrays  # embedding -> its rows of trainable_token_indices

    def __str__(self) -> str:
        kind = "DoRA" if self.settings.get("use_dora") else "LoRA"
        text = f"{kind}, rank {self.settings['r']}, {len(self.changes)} modules"
        text += f", {len(self.replacements)} arrays trained whole" if self.replacements else ""
        return f"{text}, base model {self.base or 'unknown'}"

    @property
    def base(self) -> str | None:
        """The name or path of the base model, if the adapter states it."""
        name = self.settings.get("base_model_name_or_path")
        return printable(name) if name else None

    def saves(self, name: str) -> bool:
        """Whether an array is of a module that was copied to be trained whole."""
        parts = name.split(".")
        paths = [".".join(["", *parts[:length]]) for length in range(1, len(parts))]
        modules = names_of(self.settings.get("modules_to_save"))
        return any(path.endswith(f".{module}") for path in paths for module in modules)

    def scale(self, module: str, rank: int) -> float:
        """The factor s of a module's low-rank update."""
        alpha = value_for(self.settings, "lora_alpha", "alpha_pattern", module)
        return alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank


def read_adapter(directory: Path) -> Adapter:
    """The adapter in a directory of adapter_config.json and adapter_model.safetensors or .bin.

    Raises:
        ConversionError: it is not LoRA's, has a setting that rules out merging, or is damaged.
    """
    if not (directory / CONFIG).is_file():
        hint = f"; pass {directory.parent}" if (directory.parent / CONFIG).is_file() else ""
        raise ConversionError(f"{directory}: is not the directory of a PEFT adapter, which has {CONFIG}{hint}")
    try:
        settings = read_json(directory / CONFIG)
        check_settings(settings)
        changes: dict[str, dict[str, np.ndarray]] = {}
        replacements, tokens = {}, {}
        for name, array in _read_tensors(directory).items():
            name = name.removeprefix(_PREFIX)
            if str(array.dtype) not in _FLOATS:
                raise ConversionError(f"{name}: is {array.dtype}; an adapter of {', '.join(_FLOATS)} can be merged")
            if match := _PART.fullmatch(name):
                changes.setdefault(match[1], {})[match[2]] = array
            elif name.endswith(_TOKENS):
                tokens[name.removesuffix(_TOKENS)] = array
            elif _WHOLE in name:  # stored twice, as peft does for embeddings
                replacements.setdefault(name.replace(_WHOLE, "."), array)
            elif _ORIGINAL not in name:
                replacements[name.replace(".base_layer.", ".")] = array
        adapter = Adapter(directory, settings, changes, replacements, tokens)
        for module, parts in changes.items():
            _check_parts(adapter, module, parts)
    except ConversionError as error:
        raise ConversionError(str(error) if str(directory) in str(error) else f"{directory}: {error}") from None
    return adapter


def merge_adapter(
    adapter: Adapter, target: Family, settings: Mapping[str, Any], arrays: Arrays
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(settings, arrays) of a family's model with the adapter merged; the given arrays do not change.

    The low-rank update is computed in float32, or in the weight's dtype if that is wider, as in `peft`.

    Raises:
        MissingPackageError: PyTorch is not installed.
        ConversionError: the adapter belongs to another base model, or it has a low-rank
            change of one tied tensor, which merging would apply to the others too.
    """
    require_torch(f"{adapter.directory}: merging it")
    import torch

    try:
        with torch.no_grad():
            return _merge(adapter, target, settings, arrays)
    except ConversionError as error:
        base = f"; its base model is {adapter.base}" if adapter.base else ""
        raise ConversionError(f"{adapter.directory}: {error}{base}") from None


def _merge(
    adapter: Adapter, target: Family, settings: Mapping[str, Any], arrays: Arrays
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    base, ties = target.with_copies(settings, dict(arrays))
    weights = [f"{module}.weight" for module in (*adapter.changes, *adapter.tokens)]
    full_name = target.with_prefix([*weights, *adapter.replacements])
    merged = dict(base)
    for name, array in adapter.replacements.items():
        merged[full_name[name]] = _replacement(full_name[name], array, base)
    # peft stores an embedding twice if its tables are tied, and a module of its own only if modules_to_save names it.
    stored = [full_name[name] for name in adapter.replacements if full_name[name] in ties and not adapter.saves(name)]
    if stored:
        merged |= {name: merged[stored[-1]] for name in ties if merged[name] is base[name] or name in stored}
    rows_of = {full_name[f"{module}.weight"]: (module, rows) for module, rows in adapter.tokens.items()}
    order = [*target.embeddings, *rows_of]  # as in peft, where the last of several tied tables overwrites the others
    for name in sorted(rows_of, key=order.index):
        table = _with_rows(adapter, name, *rows_of[name], merged)
        merged |= dict.fromkeys([copy for copy in (name, *ties) if merged[copy] is merged[name]], table)
    for module, parts in adapter.changes.items():
        name = full_name[f"{module}.weight"]
        if name in ties:
            raise ConversionError(
                f"{name}: has a low-rank update and is tied to {ties[-1] if name != ties[-1] else ties[0]}, which "
                "merging would change too; untie the base model before the adapter is trained"
            )
        merged |= _with_change(adapter, module, name, parts, merged)
    separate = len({id(merged[name]) for name in ties}) > 1
    return target.untied(settings) if separate else dict(settings), merged


def _with_change(adapter: Adapter, module: str, name: str, parts: Arrays, arrays: Arrays) -> dict[str, np.ndarray]:
    """A module's weight, and its bias if that changes, with the low-rank update merged."""
    import torch

    if name not in arrays:
        raise ConversionError(f"{module}: the base model has no such module with a weight")
    weight = to_torch_tensor(arrays[name])
    is_embedding = _EMBEDDING[0] in parts
    factors = _EMBEDDING if is_embedding else _LINEAR
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (to_torch_tensor(parts[part]).to(dtype) for part in factors)
    shape = (a.shape[1], b.shape[0]) if is_embedding else (b.shape[0], a.shape[1])
    if shape != tuple(weight.shape):
        raise ConversionError(f"{name}: is {list(weight.shape)} in the base model and {list(shape)} in the adapter")
    product = b @ a
    change = (product.T if is_embedding else product) * adapter.scale(module, len(a))
    if _LENGTHS in parts:
        merged = _rescaled(weight, change, to_torch_tensor(parts[_LENGTHS]).to(dtype), is_embedding)
    else:
        merged = weight + (change.to(weight.dtype) if is_embedding else change)
    output = {name: from_torch(merged.to(weight.dtype))}
    if _BIAS in parts:
        bias_name = name.removesuffix("weight") + "bias"
        if bias_name not in arrays:
            raise ConversionError(f"lora_bias=True: {module} has no bias to merge it into")
        bias = to_torch_tensor(arrays[bias_name])
        change = to_torch_tensor(parts[_BIAS]).to(dtype) * adapter.scale(module, len(a))
        output[bias_name] = from_torch((bias + change).to(bias.dtype))
    return output


def _rescaled(weight: "Tensor", change: "Tensor", lengths: "Tensor", is_embedding: bool) -> "Tensor":
    """DoRA: the sum of weight and change, with the norm of each output's weights replaced by a learned magnitude."""
    import torch

    total = weight + change
    norms = torch.linalg.norm(total.T if is_embedding else total, dim=1)
    if lengths.shape != norms.shape:
        raise ConversionError(f"{_LENGTHS}: has {list(lengths.shape)} numbers and must have {list(norms.shape)}")
    factor = lengths / norms
    return factor.view((1, -1) if is_embedding else (-1, 1)) * total


def _replacement(name: str, array: np.ndarray, arrays: Arrays) -> np.ndarray:
    if name not in arrays:
        raise ConversionError(f"{name}: the base model has no such array")
    if array.shape != arrays[name].shape:
        shapes = f"{list(arrays[name].shape)} in the base model and {list(array.shape)} in the adapter"
        is_resized = array.ndim == 2 and array.shape[1:] == arrays[name].shape[1:]
        resize = f"model.resize_token_embeddings({len(array)}), model.save_pretrained(DIR)"
        hint = f"; resize the base model as it was for the training, with transformers: {resize}; and pass DIR"
        raise ConversionError(f"{name}: is {shapes}{hint * is_resized}")
    return array.astype(arrays[name].dtype)


def _with_rows(adapter: Adapter, name: str, module: str, rows: np.ndarray, arrays: Arrays) -> np.ndarray:
    """A module's table with its trained rows, whose indices `trainable_token_indices` lists, or maps modules to."""
    if name not in arrays:
        raise ConversionError(f"{module}: the base model has no such module with a weight")
    setting, table = adapter.settings.get("trainable_token_indices"), arrays[name]
    indices = setting
    if isinstance(setting, Mapping):  # from names, each of which ends the paths of modules
        matches = [value for key, value in setting.items() if module.endswith(key)]
        indices = matches[0] if len(matches) == 1 else None
    indices = indices if isinstance(indices, list) else []
    valid = all(type(i) is int and 0 <= i < len(table) for i in indices)
    if not valid or rows.shape != (len(indices), *table.shape[1:]):
        raise ConversionError(
            f"trainable_token_indices={printable(repr(setting))}: must list the {len(rows)} trained rows of {name}, "
            f"which is {list(table.shape)}"
        )
    merged = np.array(table)
    merged[indices] = rows.astype(table.dtype)
    return merged


def _check_parts(adapter: Adapter, module: str, parts: Arrays) -> None:
    """Raises: ConversionError if a module's parts are incomplete, or contradict the settings."""
    factors = _EMBEDDING if _EMBEDDING[0] in parts else _LINEAR
    expected = {*factors} | ({_LENGTHS} if adapter.settings.get("use_dora") else set())
    expected |= {_BIAS} if adapter.settings.get("lora_bias") else set()
    if mismatch := sorted(expected ^ parts.keys()):
        problem = "is missing" if mismatch[0] in expected else "contradicts the settings"
        raise ConversionError(f"{module}.{mismatch[0]}: {problem}")
    a, b = (parts[part] for part in factors)
    rank = value_for(adapter.settings, "r", "rank_pattern", module)
    if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] == rank:
        shapes = " and ".join(str(list(part.shape)) for part in (a, b))
        raise ConversionError(f"{module}: its matrices are {shapes}, which contradicts rank {rank}")
    if not is_target(adapter.settings, module):
        raise ConversionError(f"{module}: has a low-rank update, and target_modules does not name it")


def _read_tensors(directory: Path) -> dict[str, np.ndarray]:
    path = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if path is None:
        raise ConversionError(f"has no weights; looked for {' and '.join(WEIGHTS)}")
    arrays = read_safetensors(path)[0] if path.suffix == ".safetensors" else to_arrays(read_torch(path), path)
    if not arrays:
        raise ConversionError(f"{path}: holds no tensors")
    return dict(arrays)
