"""Learning-rate schedules, one formula for both frameworks.

n counts updates from `first_update`, w is `warmup_updates`, r is `learning_rate`, and "last" in a formula is
`final_learning_rate`. `numbers` is the array module: numpy,
or jax.numpy if n is traced.
"""

import math
from collections.abc import Callable
from typing import Any

from ..backend.errors import ConfigError
from ..configs.training import TrainingConfig


def warm_up(n: Any, config: TrainingConfig, numbers: Any) -> Any:
    """min(1, n / w)."""
    return numbers.minimum(1.0, n / config.warmup_updates) if config.warmup_updates else 1.0


def constant(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """r · min(1, n / w)."""
    return config.learning_rate * warm_up(n, config, numbers)


def noam(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """r · d_model^-0.5 · min(n^-0.5, n · w^-1.5). Source: Vaswani et al. 2017, section 5.3."""
    return config.learning_rate * d_model**-0.5 * _rise_and_decay(n, config, numbers) * config.warmup_updates**-0.5


def noam_per_part(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """noam with n counting micro-batches, and n = 0 taken as 1: its warm-up is `accumulation` times shorter.

    Source: annotated_transformer, as published.
    """
    return noam(numbers.maximum(n * config.accumulation, 1), config, d_model, numbers)


def inverse_sqrt(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """r · min(n / w, sqrt(w / n)). Source: fairseq, `inverse_sqrt`."""
    return config.learning_rate * _rise_and_decay(n, config, numbers)


def cosine(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """Warm-up to r, then last + (r - last)(1 + cos(pi t)) / 2; t rises from 0 at w to 1 at `total_updates` and stays 1.

    Raises:
        ConfigError: `total_updates` is not set.
    Source: Loshchilov and Hutter 2017, eq. 5.
    """
    return _to_final(n, config, numbers, lambda t: (1 + numbers.cos(math.pi * t)) / 2)


def linear(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """Warm-up to r, then last + (r - last)(1 - t), with t as in `cosine`.

    Raises:
        ConfigError: `total_updates` is not set.
    Source: transformers, `get_linear_schedule_with_warmup`.
    """
    return _to_final(n, config, numbers, lambda t: 1 - t)


def step(n: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """Warm-up to r, then r · f^floor((n - w) / s), with f = `step_factor` and s = `step_updates`.

    Raises:
        ConfigError: `step_updates` is not set.
    """
    if config.step_updates is None:
        raise ConfigError("schedule='step': needs step_updates, which only `train` fills in")
    drops = numbers.maximum((n - config.warmup_updates) // config.step_updates, 0)
    return config.learning_rate * warm_up(n, config, numbers) * config.step_factor**drops


def _to_final(n: Any, config: TrainingConfig, numbers: Any, decay: Callable[[Any], Any]) -> Any:
    """Warm-up, then from r to `final_learning_rate`; decay falls from 1 to 0 while t rises from 0 to 1."""
    if config.total_updates is None:
        raise ConfigError(f"schedule={config.schedule!r}: needs total_updates, which only `train` fills in")
    t = (n - config.warmup_updates) / (config.total_updates - config.warmup_updates)
    span = config.learning_rate - config.final_learning_rate
    rate = config.final_learning_rate + span * decay(numbers.clip(t, 0.0, 1.0))
    return rate * warm_up(n, config, numbers)


def _rise_and_decay(n: Any, config: TrainingConfig, numbers: Any) -> Any:
    """min(n / w, sqrt(w / n)); 0 at n = 0."""
    w = config.warmup_updates
    return numbers.minimum(n / w, numbers.sqrt(w / numbers.maximum(n, 1)))


SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": constant,
    "noam": noam,
    "noam_per_part": noam_per_part,
    "inverse_sqrt": inverse_sqrt,
    "cosine": cosine,
    "linear": linear,
    "step": step,
}


def learning_rate(update: Any, config: TrainingConfig, d_model: int, numbers: Any) -> Any:
    """The learning rate of an update, counted from 0; the formula's n is `update` + `first_update`."""
    n = numbers.asarray(update, float) + config.first_update  # JAX would divide int32 in float32
    return SCHEDULES[config.schedule](n, config, d_model, numbers)
