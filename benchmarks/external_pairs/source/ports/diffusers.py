"""A port in huggingface/diffusers: the parts of its U-Net in Linen, channels last, beside the torch classes there."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, renamed

_CHANNELS = 32  # as many as there are groups of the norms


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters by the port's names: lists are joined by `_`, kernels have their channels last."""
    arrays = {}
    for name, tensor in module.state_dict().items():
        place, _, leaf = renamed(name, [(r"\.(\d+)", r"_\1")]).rpartition(".")
        array = tensor.numpy()
        if leaf == "weight":
            leaf = "kernel" if array.ndim > 1 else "scale"
            array = array.transpose(*range(2, array.ndim), 1, 0) if array.ndim > 1 else array
        arrays[f"{place}.{leaf}"] = array
    return arrays


def _rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def residual_block(folder: Path) -> Pair:
    """`ResnetBlock2D`: group norms, convolutions, an embedding of the time added in between."""
    modeling, port = (import_module(f"diffusers.models.resnet{end}") for end in ("", "_flax"))
    module = modeling.ResnetBlock2D(in_channels=_CHANNELS, out_channels=2 * _CHANNELS, temb_channels=10, eps=1e-5)
    random_parameters(module)
    inner = port.FlaxResnetBlock2D(_CHANNELS, 2 * _CHANNELS)
    picture, time = _rows(0, 2, _CHANNELS, 5, 4), _rows(1, 2, 10)
    candidate = linen_called(inner, _arrays(module), lambda model, *inputs: model(*inputs))
    return Pair(module.eval(), candidate, (picture, time), (picture.transpose(0, 2, 3, 1), time))


def transformer(folder: Path) -> Pair:
    """`Transformer2DModel`: a picture's pixels attend to each other and to a text; its gated layers."""
    modeling = import_module("diffusers.models.transformers.transformer_2d")
    port = import_module("diffusers.models.attention_flax")
    sizes: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": _CHANNELS}
    module = modeling.Transformer2DModel(**sizes, cross_attention_dim=10)
    random_parameters(module)
    inner = port.FlaxTransformer2DModel(_CHANNELS, 4, 8)
    picture, text = _rows(0, 2, _CHANNELS, 3, 4), _rows(1, 2, 5, 10)
    candidate = linen_called(inner, _arrays(module), lambda model, *inputs: model(*inputs))

    reference = only_output(module, "sample", ("hidden_states", "encoder_hidden_states"))
    return Pair(reference, candidate, (picture, text), (picture.transpose(0, 2, 3, 1), text))


_FUNCTIONS = ("FlaxAttention", "FlaxBasicTransformerBlock", "FlaxTransformer2DModel", "FlaxFeedForward", "FlaxGEGLU")
# two differences that this port has: gelu by tanh, and another epsilon of the first norm
_CHANGES = (("nn.gelu(hidden_gelu)", "nn.gelu(hidden_gelu, approximate=False)"),)
_NORM = "nn.GroupNorm(num_groups=32, epsilon={})\n\n        inner_dim"
_CHANGES += ((_NORM.format("1e-5"), _NORM.format("1e-6")),)
DIFFUSERS = {
    "diffusers residual block": Port(
        residual_block, "diffusers/src", "diffusers/models/resnet_flax.py", ("FlaxResnetBlock2D",)
    ),
    "diffusers attention": Port(
        transformer, "diffusers/src", "diffusers/models/attention_flax.py", _FUNCTIONS, _CHANGES
    ),
}
