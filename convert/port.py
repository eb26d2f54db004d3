"""Conversion of weights between `flax_transformer` and `torch_reference`.

The models mirror each other: a parameter has the same path in both except for its last part, so one rule per kind of
leaf is enough.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from ..backend.torch_package import require_torch
from ..configs.schema import TransformerConfig
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import Buffer, join_path, named_arrays
from .arrays.frameworks import from_torch, to_jax_arrays, to_torch_tensor
from .arrays.lazy import Spec
from .io.untrusted import check_declared_size
from .rules import IDENTITY, TRANSPOSE, Rule, Transform, Translation, translate

if TYPE_CHECKING:
    import torch

    from .. import torch_reference

# last part of a Flax name -> last part of the PyTorch name, transform of the array
LEAVES: dict[str, tuple[str, Transform]] = {
    "kernel": ("weight", TRANSPOSE),
    "embedding": ("weight", IDENTITY),
    "scale": ("weight", IDENTITY),
    "bias": ("bias", IDENTITY),
    "table": ("table", IDENTITY),
}


def to_torch(model: Transformer) -> "torch_reference.Transformer":
    """The equivalent PyTorch model; shares no memory with `model`.

    Raises:
        ConversionError: the model's arrays are not those of its config.
    """
    from ..torch_reference.model import Transformer as TorchTransformer

    return TorchTransformer.from_state_dict(model.config, to_state_dict(named_arrays(model), model.config))


def to_flax(model: "torch_reference.Transformer") -> Transformer:
    """The equivalent Flax model; shares no memory with `model`.

    Raises:
        ConversionError: the model's tensors are not those of its config, or are float64, which is disabled in JAX.
    """
    params = to_params(model.state_dict(), model.config)
    return Transformer.from_arrays(model.config, to_jax_arrays(params))


def to_state_dict(
    params: Mapping[str, Any] | nnx.State, config: TransformerConfig, *, trained_only: bool = False
) -> dict[str, "torch.Tensor"]:
    """Convert a Flax parameter tree, nested or by name, to a PyTorch state dict.

    `trained_only`: the tree has trained parameters only, without fixed tables, as for gradients.

    Raises:
        ConversionError: lists all arrays that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    require_torch("a state dict")
    port = port_of(config, trained_only)
    arrays = {name: np.asarray(a) for name, a in arrays_by_name(params).items()}
    targets = translate(port.rules, arrays, port.specs)
    return {name: to_torch_tensor(a) for name, a in targets.items()}


def to_params(
    state_dict: Mapping[str, "torch.Tensor"], config: TransformerConfig, *, trained_only: bool = False
) -> dict[str, np.ndarray]:
    """Convert a PyTorch state dict to Flax parameters by name; `trained_only` as for `to_state_dict`.

    Raises:
        ConversionError: lists all tensors that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    port = port_of(config, trained_only)
    arrays = {name: from_torch(tensor) for name, tensor in state_dict.items()}
    return translate(port.inverses, arrays, port.target_specs)


def port_rules(names: Mapping[str, Any]) -> list[Rule]:
    """The rules of these Flax names."""
    rules = []
    for name in names:
        module, _, leaf = name.rpartition(".")
        torch_leaf, transform = LEAVES[leaf]
        rules.append(Rule((name,), (f"{module}.{torch_leaf}",), transform))
    return rules


@lru_cache(maxsize=16)
def port_of(config: TransformerConfig, trained_only: bool = False) -> Translation:
    """The rules between the two models of a config, with both sides' specs."""
    specs = flax_specs(config, trained_only)
    return Translation.of(port_rules(specs), specs)


@lru_cache(maxsize=16)
def flax_specs(config: TransformerConfig, trained_only: bool = False) -> Mapping[str, Spec]:
    """Shapes and dtypes of the Flax model's arrays, by name."""
    check_declared_size(config)
    shapes = _flax_shapes(config.replace(param_dtype="float32", compute_dtype="float32"), trained_only)
    return MappingProxyType({name: Spec(shape, config.param_dtype) for name, shape in shapes.items()})


@lru_cache(maxsize=64)
def _flax_shapes(config: TransformerConfig, trained_only: bool) -> dict[str, tuple[int, ...]]:
    """Shapes by name. The model is built in float32, because float64 may be disabled.

    It has one layer per side, whose shapes are repeated, because tracing a deep model takes seconds.
    """
    layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    model = Transformer.abstract(config.replace(num_encoder_layers=1, num_decoder_layers=1))
    shapes = {}
    for name, array in named_arrays(model, nnx.Param if trained_only else (nnx.Param, Buffer)).items():
        side, first, rest = name.partition(".layers.0.")
        names = [f"{side}.layers.{i}.{rest}" for i in range(layers[side])] if first else [name]
        shapes |= dict.fromkeys(names, array.shape)
    return dict(sorted(shapes.items()))


def arrays_by_name(tree: Mapping[str, Any] | nnx.State) -> dict[str, Any]:
    """Arrays by name, from an nnx state, a nested mapping, or a mapping by name."""
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
