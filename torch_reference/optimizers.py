"""The optimizer, from `torch.optim`, with two parameter groups: with and without weight decay."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..configs.training import TrainingConfig, check_trainable
from .model import Transformer

# (global gradient norm, its bound) -> factor of the gradients
CLIP_RULES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "torch": lambda norm, bound: (bound / (norm + 1e-6)).clamp(max=1),
    "optax": lambda norm, bound: torch.where(norm < bound, 1, bound / norm),
}
# whether a parameter is decayed; those of norms and biases have one dimension
DECAYED: dict[str, Callable[[Tensor], bool]] = {"matrices": lambda p: p.ndim > 1, "all": lambda p: True}
OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def clip(gradients: Iterable[Tensor], norm: Tensor, config: TrainingConfig) -> None:
    """Scale the gradients in place so that their global norm is at most `clip_norm`."""
    if config.clip_norm is not None:
        factor = CLIP_RULES[config.clip_rule](norm, config.clip_norm)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


def make_optimizer(model: Transformer, config: TrainingConfig) -> torch.optim.Adam:
    """`torch.optim.Adam` or `AdamW` for the model's parameters; the step sets the learning rate.

    Raises:
        ConfigError: the model's parameters are float16.
    """
    check_trainable(model.config)
    decays = DECAYED[config.decayed]
    groups = [
        {"params": [p for p in model.parameters() if decays(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if not decays(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[config.optimizer](groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps)
