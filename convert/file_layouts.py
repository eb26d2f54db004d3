"""The names that a file of bare tensors can have: those of `torch_reference`, or those of `torch.nn.Transformer`."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from ..configs.schema import TransformerConfig
from .port import flax_specs, port_rules
from .rules import ConversionError, Rule, target_specs, translate

TORCH_NN = "transformer."  # the name that most people give to their `torch.nn.Transformer`


def _torch_nn_rules(config: TransformerConfig, trained_only: bool) -> list[Rule]:
    """Encoder and decoder as `torch.nn.Transformer` has them; what it does not have, as `torch_reference`."""
    from .layouts.torch_nn import fields_of, transformer_rules

    stacks = transformer_rules(fields_of(config), TORCH_NN)
    theirs = {name for rule in stacks for name in rule.source}
    return [*stacks, *port_rules({name: None for name in flax_specs(config, trained_only) if name not in theirs})]


# layout -> (config, of trained arrays alone) -> the rules from our names to the file's
FILE_LAYOUTS: dict[str, Callable[[TransformerConfig, bool], list[Rule]]] = {
    "twinax": lambda config, trained_only: port_rules(flax_specs(config, trained_only)),
    "torch_nn": _torch_nn_rules,
}


def to_named(
    arrays: Mapping[str, np.ndarray], config: TransformerConfig, layout: str, *, trained_only: bool = False
) -> dict[str, np.ndarray]:
    """Arrays by Flax name as those of a file; `trained_only`: they are the optimiser's, which has no fixed tables.

    Raises:
        ConversionError: the layout has no such model, or lists all arrays that do not fit the config.
    """
    return translate(FILE_LAYOUTS[layout](config, trained_only), arrays, flax_specs(config, trained_only))


def from_named(
    named: Mapping[str, np.ndarray], config: TransformerConfig, layout: str, *, trained_only: bool = False
) -> dict[str, np.ndarray]:
    """The way back. Raises: ConversionError, as above."""
    rules, specs = FILE_LAYOUTS[layout](config, trained_only), flax_specs(config, trained_only)
    return translate([rule.inverse for rule in rules], named, target_specs(rules, specs))


def layout_of(names: Collection[str]) -> str:
    """The layout that bare tensors of these names are in. Raises: ConversionError where they are in none."""
    if not names:
        raise ConversionError("holds no tensors")
    if any(name.endswith("in_proj_weight") for name in names):
        return "torch_nn"
    if any(name.startswith("encoder.layers.") for name in names):
        return "twinax"
    some = ", ".join(sorted(names)[:3]) + ", …" * (len(names) > 3)
    raise ConversionError(f"its {len(names)} tensors ({some}) are in no layout that twinax knows")
