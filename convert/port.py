"""Weights between `flax_transformer` and `torch_reference`.

The models mirror each other, so a parameter's path is the same in both and only its last part differs: one rule a leaf.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from ..configs.schema import TransformerConfig
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import Buffer, join_path, named_arrays
from .arrays import from_torch, to_jax_arrays, to_torch_tensor
from .rules import IDENTITY, TRANSPOSE, Rule, Spec, Transform, Translation, translate

if TYPE_CHECKING:
    import torch

    from .. import torch_reference

# last part of a Flax name -> last part of the PyTorch name, and how the array changes
LEAVES: dict[str, tuple[str, Transform]] = {
    "kernel": ("weight", TRANSPOSE),
    "embedding": ("weight", IDENTITY),
    "scale": ("weight", IDENTITY),
    "bias": ("bias", IDENTITY),
    "table": ("table", IDENTITY),
}


def to_torch(model: Transformer) -> "torch_reference.Transformer":
    """The PyTorch model that is the same function; shares no memory with this one.

    Raises:
        ConversionError: the model's arrays are not those of its config.
    """
    from ..torch_reference.model import Transformer as TorchTransformer

    return TorchTransformer.from_state_dict(model.config, to_state_dict(named_arrays(model), model.config))


def to_flax(model: "torch_reference.Transformer") -> Transformer:
    """The Flax model that is the same function; shares no memory with this one.

    Raises:
        ConversionError: the model's tensors are not those of its config, or are float64 while JAX has that off.
    """
    params = to_params(model.state_dict(), model.config)
    return Transformer.from_arrays(model.config, to_jax_arrays(params))


def to_state_dict(
    params: Mapping[str, Any] | nnx.State, config: TransformerConfig, *, trained_only: bool = False
) -> dict[str, "torch.Tensor"]:
    """A Flax parameter tree, nested or by name, as a PyTorch state dict.

    `trained_only`: the tree has trained parameters and no fixed tables, as gradients do.

    Raises:
        ConversionError: lists all arrays that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    port = port_of(config, trained_only)
    arrays = {name: np.asarray(a) for name, a in _by_name(params).items()}
    translated = translate(port.rules, arrays, port.specs)
    return {name: to_torch_tensor(a) for name, a in translated.items()}


def to_params(
    state_dict: Mapping[str, "torch.Tensor"], config: TransformerConfig, *, trained_only: bool = False
) -> dict[str, np.ndarray]:
    """A PyTorch state dict as Flax parameters by name, for `Transformer.from_arrays`; `trained_only` as above.

    Raises:
        ConversionError: lists all tensors that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    port = port_of(config, trained_only)
    arrays = {name: from_torch(tensor) for name, tensor in state_dict.items()}
    return translate(port.inverses, arrays, port.target_specs)


def port_rules(names: Mapping[str, Any]) -> list[Rule]:
    """The rule of every Flax name."""
    rules = []
    for name in names:
        module, _, leaf = name.rpartition(".")
        torch_leaf, transform = LEAVES[leaf]
        rules.append(Rule((name,), (f"{module}.{torch_leaf}",), transform))
    return rules


@lru_cache(maxsize=16)
def port_of(config: TransformerConfig, trained_only: bool = False) -> Translation:
    """The rules between both models of a config, with the specs of either side."""
    specs = flax_specs(config, trained_only)
    return Translation.of(port_rules(specs), specs)


@lru_cache(maxsize=16)
def flax_specs(config: TransformerConfig, trained_only: bool = False) -> Mapping[str, Spec]:
    """Shape and dtype of every array of the Flax model, by name."""
    shapes = _flax_shapes(config.replace(param_dtype="float32", compute_dtype="float32"), trained_only)
    return MappingProxyType({name: Spec(shape, config.param_dtype) for name, shape in shapes.items()})


@lru_cache(maxsize=64)
def _flax_shapes(config: TransformerConfig, trained_only: bool) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of a float32 model: float64 may be switched off.

    Of one layer per side, which stands for all: tracing a deep model takes seconds.
    """
    layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    model = Transformer.abstract(config.replace(num_encoder_layers=1, num_decoder_layers=1))
    shapes = {}
    for name, array in named_arrays(model, nnx.Param if trained_only else (nnx.Param, Buffer)).items():
        side, first, rest = name.partition(".layers.0.")
        names = [f"{side}.layers.{i}.{rest}" for i in range(layers[side])] if first else [name]
        shapes |= dict.fromkeys(names, array.shape)
    return dict(sorted(shapes.items()))


def _by_name(tree: Mapping[str, Any] | nnx.State) -> dict[str, Any]:
    """Arrays by name, from an nnx state, a nested mapping, or a mapping that has names already."""
    if isinstance(tree, nnx.State):
        return named_arrays(tree)
    flat: dict[str, Any] = {}

    def visit(path: tuple[Any, ...], node: Any) -> None:
        if isinstance(node, Mapping):
            for key, child in node.items():
                visit((*path, key), child)
        else:
            flat[join_path(path)] = node

    visit((), tree)
    return flat
