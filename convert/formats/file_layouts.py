"""Layouts of single files: the tensor names of `torch_reference`, `torch.nn.Transformer` or a published system.

A layout is a name, optionally with output prefixes of tensor names: `leftover:encoder=enc,decoder=dec`.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ...backend.errors import ConfigError, ConversionError
from ...backend.torch_package import require_torch
from ...configs.registry import PUBLISHED_LAYOUTS
from ...configs.schema import TransformerConfig
from ..checkpoint import Checkpoint
from ..layouts.published import PublishedLayout
from ..port import flax_specs, port_of, port_rules
from ..rules import Rule, Translation, translate_lazily

Named = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
_OWN = ("twinax", "torch_nn")
TORCH_NN = "transformer."  # the usual attribute name of a `torch.nn.Transformer`


def _torch_nn_rules(config: TransformerConfig, trained_only: bool) -> list[Rule]:
    """Rules to the names of `torch.nn.Transformer` for encoder and decoder, and of `torch_reference` for the rest."""
    require_torch("layout torch_nn")
    from ..layouts.torch_nn import fields_of, transformer_rules

    stacks = transformer_rules(fields_of(config), TORCH_NN)
    names = {name for rule in stacks for name in rule.source}
    return [*stacks, *port_rules({name: None for name in flax_specs(config, trained_only) if name not in names})]


@lru_cache(maxsize=16)
def _translation(name: str, config: TransformerConfig, trained_only: bool) -> Translation:
    """The rules between Flax names and layout twinax or torch_nn; `trained_only` omits fixed tables."""
    if name == "twinax":
        return port_of(config, trained_only)
    return Translation.of(_torch_nn_rules(config, trained_only), flax_specs(config, trained_only))


PUBLISHED: Mapping[str, PublishedLayout] = PUBLISHED_LAYOUTS


def file_layouts() -> tuple[str, ...]:
    """The names of all file layouts."""
    return (*_OWN, *PUBLISHED)


def is_file_layout(layout: str) -> bool:
    """Whether this is a file layout, with or without prefixes. Raises: ConversionError if its prefixes are invalid."""
    name, _ = _parse(layout)
    return name in _OWN or name in PUBLISHED


def is_published(layout: str) -> bool:
    """Whether this is the layout of a published system."""
    return _parse(layout)[0] in PUBLISHED


def to_named(
    arrays: Mapping[str, np.ndarray],
    config: TransformerConfig,
    layout: str,
    *,
    trained_only: bool = False,
    unused: Mapping[str, np.ndarray] | None = None,
) -> Named:
    """Convert arrays by Flax name to the names of a file layout.

    `trained_only`: the arrays are an optimizer's, without fixed tables. `unused` arrays that the layout stores are
    included.

    Raises:
        ConversionError: the layout has no such model, or arrays do not fit the config; the message lists them all.
    """
    name, prefixes = _parse(layout)
    if name in _OWN:
        translation = _translation(name, config, trained_only)
        return translate_lazily(translation.rules, arrays, translation.specs)
    tensors = PUBLISHED[name].write(name, arrays, config) | PUBLISHED[name].split(unused or {})[1]
    return _rename(tensors, prefixes)


def from_named(
    tensors: Mapping[str, np.ndarray], config: TransformerConfig, layout: str, *, trained_only: bool = False
) -> tuple[Named, Arrays]:
    """The inverse of `to_named`: (arrays by Flax name, unused arrays). Raises: ConversionError, as `to_named`."""
    name, prefixes = _parse(layout)
    if name in PUBLISHED:
        return PUBLISHED[name].read(_rename(tensors, {prefix: part for part, prefix in prefixes.items()}), config)
    translation = _translation(name, config, trained_only)
    return translate_lazily(translation.inverses, tensors, translation.target_specs), {}


def trained_rules(config: TransformerConfig, layout: str) -> list[Rule]:
    """The rules from the Flax names of trained parameters to the names of a file layout."""
    name, prefixes = _parse(layout)
    if name in _OWN:
        return [*_translation(name, config, True).rules]
    specs = flax_specs(config, trained_only=True)
    rules = [rule for rule in PUBLISHED[name].rules(config) if {*rule.source} <= specs.keys()]
    renamed = {target: new for rule in rules for target, new in zip(rule.target, _renamed(rule, prefixes), strict=True)}
    return [Rule(rule.source, tuple(renamed[target] for target in rule.target), rule.transform) for rule in rules]


def _renamed(rule: Rule, prefixes: Mapping[str, str]) -> list[str]:
    return [*_rename({target: np.empty(0) for target in rule.target}, prefixes)]


def system_of(config: TransformerConfig) -> str | None:
    """The published system with such a model, in either variant; None if there is none."""
    return next((name for name, layout in PUBLISHED.items() if layout.variant(name, config) is not None), None)


def describe_assumed(name: str, checkpoint: Checkpoint) -> str:
    """One line that lists the assumed settings of a published system's file, and how to set them."""
    settings = ",".join(item.replace(" ", "_").replace("'", "") for item in checkpoint.assumed)
    return (
        f"{name}: assumed {', '.join(checkpoint.assumed)}, because the file does not state it; "
        f"to set it: twinax convert ORIGINAL NEW --config {checkpoint.system}:{settings}"
    )


def stated_settings(settings: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The config fields stated by the settings that a published system stores beside its state dict."""
    layouts = (layout for layout in PUBLISHED.values() if any(re.fullmatch(layout.mark, name) for name in arrays))
    return next((layout.stated_fields(settings, arrays) for layout in layouts), {})


def published_config(
    tensors: Mapping[str, np.ndarray], layout: str, variant: str | None, file_fields: Mapping[str, Any] | None = None
) -> tuple[TransformerConfig, tuple[str, ...]]:
    """(config of a published system's state dict, its assumed settings).

    `variant` is a system with fields that the tensors do not determine: `leftover:repaired,num_heads=4`, or
    `leftover:as_published`, which is the default. `file_fields` are fields that the file itself states.

    Raises:
        ConversionError: the tensors are not of this system, or the config is invalid.
    """
    name, prefixes = _parse(layout)
    system, _, rest = (variant or name).partition(":")
    items = [item for item in rest.split(",") if item]
    fields = {field: _value(value) for field, equals, value in (item.partition("=") for item in items) if equals}
    flags = {item for item in items if "=" not in item}
    if system not in PUBLISHED or not flags <= {"repaired", "as_published"} or len(flags) > 1:
        raise ConversionError(
            f"config={variant!r}: must be one of {', '.join(PUBLISHED)}, optionally with settings, as in "
            "leftover:repaired,num_heads=4"
        )
    if fields.keys() & {"as_published", "repaired"}:
        raise ConversionError(f"config={variant!r}: write {system}:as_published or {system}:repaired")
    if len(fields) + len(flags) < len(items):
        raise ConversionError(f"config={variant!r}: sets a field twice")
    if system != name:
        raise ConversionError(f"config={variant!r}: the tensors are in layout {name}")
    standard = _rename(tensors, {prefix: part for part, prefix in prefixes.items()})
    fields, as_published = {**(file_fields or {}), **fields}, "repaired" not in flags
    try:
        config = PUBLISHED[name].config(name, standard, as_published, fields)
    except ConfigError as error:
        raise ConversionError(f"{error}; set what the tensors do not determine, as in {name}:num_heads=4") from None
    return config, PUBLISHED[name].assumptions(name, standard, config, as_published if flags else None, fields)


def layout_of(names: Collection[str]) -> str:
    """The layout of bare tensors with these names. Raises: ConversionError if no layout matches."""
    if not names:
        raise ConversionError("holds no tensors")
    if any(name.endswith("in_proj_weight") for name in names):
        return "torch_nn"
    for layout, published in PUBLISHED.items():
        if any(re.fullmatch(published.mark, name) for name in names):
            prefixes = {part: prefix for part, prefix in published.prefixes(names).items() if part != prefix}
            return layout + ":" * bool(prefixes) + ",".join(f"{part}={prefix}" for part, prefix in prefixes.items())
    if any(name.startswith("encoder.layers.") for name in names):
        return "twinax"
    examples = ", ".join(sorted(names)[:3]) + ", …" * (len(names) > 3)
    raise ConversionError(
        f"its {len(names)} tensors ({examples}) match no layout that twinax supports; if the file is of "
        "a Hugging Face directory, pass the directory, or the directory's path to `twinax convert` with --config"
    )


def _parse(layout: str) -> tuple[str, dict[str, str]]:
    """(name, standard prefix of tensor names -> prefix in this layout)."""
    name, _, rest = layout.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if rest]
    prefixes = {part: prefix for part, _, prefix in pairs}
    parts = PUBLISHED[name].parts if name in PUBLISHED else ()
    for part, prefix in prefixes.items():
        if part not in parts or not re.fullmatch(r"\w+(\.\w+)*", prefix):
            rule = f"{name} allows new prefixes for {' and '.join(parts)}" if parts else f"{name} allows no new prefix"
            raise ConversionError(f"layout={layout!r}: {rule}, as in leftover:encoder=enc,decoder=dec")
    names = {prefixes.get(part, part) for part in parts}
    if len(prefixes) < len(pairs) or len(names) < len(parts):
        raise ConversionError(f"layout={layout!r}: two parts have the same prefix")
    return name, prefixes


def _value(text: str) -> Any:
    """The JSON value of a text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _rename(arrays: Mapping[str, np.ndarray], prefixes: Mapping[str, str]) -> Arrays:
    """The arrays with output prefixes; the longest matching prefix applies."""
    output = {}
    for name, array in arrays.items():
        old = max((p for p in prefixes if name.startswith(f"{p}.")), key=len, default=None)
        output[name if old is None else prefixes[old] + name[len(old) :]] = array
    return output
