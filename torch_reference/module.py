"""What every module here shares: its activations by path.

A path runs from the model's root, joined by dots: `encoder.layers.0.self_attention.weights`.
"""

from typing import Any

import torch
from torch import Tensor, nn


def record(module: nn.Module, name: str, value: Tensor) -> None:
    """Offers an activation to `activations`; does nothing outside of it."""
    captures = vars(module).get("captures")
    if captures is not None:
        captures[name] = value


def activations(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    """Calls the model: (its result, every recorded activation by path)."""
    modules = dict(model.named_modules())
    try:
        for module in modules.values():
            object.__setattr__(module, "captures", {})
        result = model(*args, **kwargs)
        return result, {
            f"{path}.{name}".removeprefix("."): value
            for path, module in modules.items()
            for name, value in vars(module)["captures"].items()
        }
    finally:
        for module in modules.values():
            vars(module).pop("captures", None)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dtype_of(name: str) -> torch.dtype:
    """torch's number type of a config's name for it."""
    return getattr(torch, name)
