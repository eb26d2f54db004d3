"""What every module here shares: its activations by path.

A path runs from the model's root, joined by dots: `encoder.layers.0.self_attention.weights`.
"""

from typing import Any

import torch
from torch import Tensor, nn


def record(module: nn.Module, name: str, value: Tensor) -> None:
    """Offers an activation to `activations`; does nothing outside of it."""
    if "captures" in vars(module):
        path, captured = vars(module)["captures"]
        captured[f"{path}.{name}".removeprefix(".")] = value


def activations(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    """Calls the model: (its result, every recorded activation by path, in the order of the computation)."""
    captured: dict[str, Tensor] = {}
    try:
        for path, module in model.named_modules():
            vars(module)["captures"] = (path, captured)
        return model(*args, **kwargs), captured
    finally:
        for module in model.modules():
            vars(module).pop("captures", None)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a config's name for it."""
    return getattr(torch, name)
