"""The names that a file's tensors can have: those of `torch_reference`, of `torch.nn.Transformer`, or of a published
system. A layout is a name, and where first parts of names are others, those: `leftover:encoder=enc,decoder=dec`.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ..configs.errors import ConfigError, ConversionError
from ..configs.registry import PUBLISHED_LAYOUTS
from ..configs.schema import TransformerConfig
from .checkpoint import Checkpoint
from .layouts.published import PublishedLayout
from .port import flax_specs, port_of, port_rules
from .rules import Rule, Translation, translate

Arrays = dict[str, np.ndarray]
_OWN = ("twinax", "torch_nn")
TORCH_NN = "transformer."  # the name that most people give to their `torch.nn.Transformer`


def _torch_nn_rules(config: TransformerConfig, trained_only: bool) -> list[Rule]:
    """Encoder and decoder as `torch.nn.Transformer` has them; what it does not have, as `torch_reference`."""
    from .layouts.torch_nn import fields_of, transformer_rules

    stacks = transformer_rules(fields_of(config), TORCH_NN)
    theirs = {name for rule in stacks for name in rule.source}
    return [*stacks, *port_rules({name: None for name in flax_specs(config, trained_only) if name not in theirs})]


@lru_cache(maxsize=16)
def _translation(name: str, config: TransformerConfig, trained_only: bool) -> Translation:
    """Between our names and those of layout twinax or torch_nn; `trained_only`: of trained arrays alone."""
    if name == "twinax":
        return port_of(config, trained_only)
    return Translation.of(_torch_nn_rules(config, trained_only), flax_specs(config, trained_only))


PUBLISHED: Mapping[str, PublishedLayout] = PUBLISHED_LAYOUTS


def file_layouts() -> tuple[str, ...]:
    """Every layout of a file, by name."""
    return (*_OWN, *PUBLISHED)


def is_file_layout(layout: str) -> bool:
    """Whether it is the name of one, prefixes or not. Raises: ConversionError where the prefixes are wrong."""
    name, _ = _parse(layout)
    return name in _OWN or name in PUBLISHED


def is_published(layout: str) -> bool:
    """Whether it is a published system's."""
    return _parse(layout)[0] in PUBLISHED


def to_named(
    arrays: Mapping[str, np.ndarray],
    config: TransformerConfig,
    layout: str,
    *,
    trained_only: bool = False,
    unused: Mapping[str, np.ndarray] | None = None,
) -> Arrays:
    """Arrays by Flax name as those of a file.

    `trained_only`: they are the optimiser's, which has no fixed tables. Of the `unused` arrays, those that stand in
    such a file come along.

    Raises:
        ConversionError: the layout has no such model, or lists all arrays that do not fit the config.
    """
    name, prefixes = _parse(layout)
    if name in _OWN:
        translation = _translation(name, config, trained_only)
        return translate(translation.rules, arrays, translation.specs)
    theirs = PUBLISHED[name].write(name, arrays, config) | PUBLISHED[name].split(unused or {})[1]
    return _rename(theirs, prefixes)


def from_named(
    named: Mapping[str, np.ndarray], config: TransformerConfig, layout: str, *, trained_only: bool = False
) -> tuple[Arrays, Arrays]:
    """The way back: (arrays by Flax name, arrays that no computation reads). Raises: ConversionError, as above."""
    name, prefixes = _parse(layout)
    if name in PUBLISHED:
        return PUBLISHED[name].read(_rename(named, {there: part for part, there in prefixes.items()}), config)
    translation = _translation(name, config, trained_only)
    return translate(translation.inverses, named, translation.target_specs), {}


def system_of(config: TransformerConfig) -> str | None:
    """The published system that has such a model, in either variant; None where none has."""
    return next((name for name, layout in PUBLISHED.items() if layout.variant(name, config) is not None), None)


def describe_assumed(name: str, checkpoint: Checkpoint) -> str:
    """One line: what a published system's file does not state and was assumed, and how to set it."""
    settings = ",".join(item.replace(" ", "_").replace("'", "") for item in checkpoint.assumed)
    return (
        f"{name}: assumed {', '.join(checkpoint.assumed)}, because the file does not state it; "
        f"to set it: twinax convert ORIGINAL NEW --config {checkpoint.system}:{settings}"
    )


def stated_settings(settings: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The config fields that the settings beside a published system's state dict state."""
    layouts = (layout for layout in PUBLISHED.values() if any(re.fullmatch(layout.mark, name) for name in arrays))
    return next((layout.stated(settings, arrays) for layout in layouts), {})


def published_config(
    named: Mapping[str, np.ndarray], layout: str, variant: str | None, beside: Mapping[str, Any] | None = None
) -> tuple[TransformerConfig, tuple[str, ...]]:
    """(config of a published system's state dict, what of it was assumed).

    `variant` is a system with what the tensors do not determine: `leftover:repaired,num_heads=4`, or
    `leftover:as_published`, which is assumed where neither is there. `beside` is what the file itself states of that.

    Raises:
        ConversionError: the tensors are of no such system, or the config is none.
    """
    name, prefixes = _parse(layout)
    wanted, _, rest = (variant or name).partition(":")
    items = [item for item in rest.split(",") if item]
    given = {field: _value(value) for field, equals, value in (item.partition("=") for item in items) if equals}
    words = {item for item in items if "=" not in item}
    if wanted not in PUBLISHED or not words <= {"repaired", "as_published"} or len(words) > 1:
        raise ConversionError(
            f"config={variant!r}: is none of {', '.join(PUBLISHED)}, nor one of them as leftover:repaired,num_heads=4"
        )
    if given.keys() & {"as_published", "repaired"}:
        raise ConversionError(f"config={variant!r}: write {wanted}:as_published or {wanted}:repaired")
    if len(given) + len(words) < len(items):
        raise ConversionError(f"config={variant!r}: gives a field twice")
    if wanted != name:
        raise ConversionError(f"config={variant!r}: the tensors are in layout {name}")
    standard = _rename(named, {there: part for part, there in prefixes.items()})
    known, as_published = {**(beside or {}), **given}, "repaired" not in words
    try:
        config = PUBLISHED[name].config(name, standard, as_published, known)
    except ConfigError as error:
        raise ConversionError(f"{error}; what the tensors do not say is given as {name}:num_heads=4") from None
    return config, PUBLISHED[name].assumptions(name, standard, config, as_published if words else None, known)


def layout_of(names: Collection[str]) -> str:
    """The layout that bare tensors of these names are in. Raises: ConversionError where they are in none."""
    if not names:
        raise ConversionError("holds no tensors")
    if any(name.endswith("in_proj_weight") for name in names):
        return "torch_nn"
    for layout, published in PUBLISHED.items():
        if any(re.fullmatch(published.mark, name) for name in names):
            prefixes = {part: there for part, there in published.prefixes(names).items() if part != there}
            return layout + ":" * bool(prefixes) + ",".join(f"{part}={there}" for part, there in prefixes.items())
    if any(name.startswith("encoder.layers.") for name in names):
        return "twinax"
    some = ", ".join(sorted(names)[:3]) + ", …" * (len(names) > 3)
    raise ConversionError(f"its {len(names)} tensors ({some}) are in no layout that twinax knows")


def _parse(layout: str) -> tuple[str, dict[str, str]]:
    """(name, first part of a name -> what stands there instead)."""
    name, _, rest = layout.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if rest]
    prefixes = {part: there for part, _, there in pairs}
    parts = PUBLISHED[name].parts if name in PUBLISHED else ()
    for part, there in prefixes.items():
        if part not in parts or not re.fullmatch(r"\w+(\.\w+)*", there):
            allowed = f"{' and '.join(parts)} can be others" if parts else "no part can be another"
            raise ConversionError(f"layout={layout!r}: in {name} {allowed}, as in leftover:encoder=enc,decoder=dec")
    names = {prefixes.get(part, part) for part in parts}
    if len(prefixes) < len(pairs) or len(names) < len(parts):
        raise ConversionError(f"layout={layout!r}: two parts have one name")
    return name, prefixes


def _value(text: str) -> Any:
    """A number, where it is one."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _rename(arrays: Mapping[str, np.ndarray], prefixes: Mapping[str, str]) -> Arrays:
    """The same with other first parts; the longest that fits."""
    renamed = {}
    for name, array in arrays.items():
        old = max((p for p in prefixes if name.startswith(f"{p}.")), key=len, default=None)
        renamed[name if old is None else prefixes[old] + name[len(old) :]] = array
    return renamed
