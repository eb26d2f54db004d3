"""What a published system's module is as an oracle: a third function beside the twins, written apart from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.schema import TransformerConfig

Pairs = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """How a system's module is built, called and decoded, and where its values are.

    In `activations`, `<` after a path is what goes into a module, `>` what comes out; a star is the number of a layer,
    # that of a head.
    """

    build: Callable[[TransformerConfig, bool, float], nn.Module]  # (config, as published, dropout), random weights
    call: Callable[[Any, Tensor, Tensor, int], Tensor]  # (module, src (B, S), tgt (B, T), pad_id) -> (B, T, V)
    activations: Pairs  # ours -> the place of theirs
    raise_logit: Callable[[Any, int, Tensor], None]  # (module, token, by how much), by a parameter
    accepts: Callable[[TransformerConfig, bool], bool] = lambda config, as_published: True  # whether it has such models
    # (module, src (1, S), pad_id, bos_id, eos_id, largest n) -> tokens after the start; None: none was published
    decode: Callable[[Any, Tensor, int, int, int, int], list[int]] | None = None
    lengths_are_free: Callable[[bool], bool] = lambda as_published: True  # (as published); False: they fill the table
    small: Callable[[int], dict[str, Any]] = lambda length: {}  # fields of a small config of so many positions
    spread: float = 0.4  # of random weights that give translations of many lengths


def layer_activations(
    encoder: str, in_encoder: Pairs, decoder: str, in_decoder: Pairs, others: Pairs
) -> dict[str, str]:
    """Those of all layers, whose paths begin with `encoder` and `decoder`, and others."""
    places = {f"encoder.layers.*.{ours}": encoder + theirs for ours, theirs in in_encoder.items()}
    places |= {f"decoder.layers.*.{ours}": decoder + theirs for ours, theirs in in_decoder.items()}
    return {**places, **others}


def sizes_of(config: TransformerConfig, as_published: bool, dropout: float) -> dict[str, Any]:
    """The arguments that most of the modules have, by the names that most of them have."""
    return {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "heads": config.num_heads,
        "layers": config.num_encoder_layers,
        "dropout": dropout,
        "as_published": as_published,
    }


def add_to_bias(name: str) -> Callable[[nn.Module, int, Tensor], None]:
    """`raise_logit` of a module whose output layer has a bias of that name."""

    def add(model: nn.Module, token: int, more: Tensor) -> None:
        with torch.no_grad():
            model.get_parameter(name)[token] += more

    return add
