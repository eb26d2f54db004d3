"""A published system's module as an oracle: a third implementation, independent of the twins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.schema import TransformerConfig

Pairs = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Functions that build, call and decode a system's module, and the paths of its activations.

    In `activations`, a path with `<` is the input of a module, with `>` its output; a star stands for a layer number, #
    for a head number.
    """

    build: Callable[[TransformerConfig, bool, float], nn.Module]  # (config, as published, dropout), random weights
    call: Callable[[Any, Tensor, Tensor, int], Tensor]  # (module, src (B, S), tgt (B, T), pad_id) -> (B, T, V)
    activations: Pairs  # path of a twin's activation -> path in the module
    raise_logit: Callable[[Any, int, Tensor], None]  # (module, token, amount): raises a logit through a parameter
    # (config, as_published) -> whether it has such a model
    accepts: Callable[[TransformerConfig, bool], bool] = lambda *_: True
    # (module, src (1, S), pad_id, bos_id, eos_id, largest n) -> tokens after the start; None: no published decoding
    decode: Callable[[Any, Tensor, int, int, int, int], list[int]] | None = None
    lengths_are_free: Callable[[bool], bool] = lambda as_published: True  # False: inputs must fill the position table
    small: Callable[[int], dict[str, Any]] = lambda length: {}  # (max_length) -> further fields of a small config
    spread: float = 0.4  # scale of random weights that gives translations of many lengths


def layer_activations(
    encoder: str, in_encoder: Pairs, decoder: str, in_decoder: Pairs, others: Pairs
) -> dict[str, str]:
    """The activations of all layers, with paths that start with `encoder` and `decoder`, and `others`."""
    paths = {f"encoder.layers.*.{name}": encoder + path for name, path in in_encoder.items()}
    paths |= {f"decoder.layers.*.{name}": decoder + path for name, path in in_decoder.items()}
    return {**paths, **others}


def sizes_of(config: TransformerConfig, as_published: bool, dropout: float) -> dict[str, Any]:
    """The arguments that most modules share, by their usual names."""
    return {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "heads": config.num_heads,
        "layers": config.num_encoder_layers,
        "dropout": dropout,
        "as_published": as_published,
    }


def add_to_bias(name: str) -> Callable[[nn.Module, int, Tensor], None]:
    """`raise_logit` for a module whose output layer has a bias of this name."""

    def add(model: nn.Module, token: int, amount: Tensor) -> None:
        with torch.no_grad():
            model.get_parameter(name)[token] += amount

    return add
