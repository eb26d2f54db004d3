"""Helpers of all modules: activations by path.

A path runs from the model's root, joined by dots: `encoder.layers.0.self_attention.weights`.
"""

from typing import Any

import torch
from torch import Tensor, nn


def record(module: nn.Module, name: str, value: Tensor) -> None:
    """Record an activation for `activations`; a no-op outside of it."""
    if "captures" in vars(module):
        path, captures = vars(module)["captures"]
        captures[f"{path}.{name}".removeprefix(".")] = value


def activations(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    """Call the model; return (its result, all recorded activations by path, in the order of computation)."""
    captures: dict[str, Tensor] = {}
    try:
        for path, module in model.named_modules():
            vars(module)["captures"] = (path, captures)
        return model(*args, **kwargs), captures
    finally:
        for module in model.modules():
            vars(module).pop("captures", None)


def at_least_float32(x: Tensor) -> Tensor:
    """x, converted to float32 unless its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    return getattr(torch, name)
