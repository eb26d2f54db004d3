"""Smoothed target distributions, as plain numbers for both frameworks.

Letters: e the smoothing, V the vocabulary size.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..backend.errors import ConfigError


class Target(NamedTuple):
    """A smoothed target distribution: the probability of the label, of each other token, and of padding."""

    label: float
    other: float
    padding: float
    entropy: float  # nats that the loss subtracts: the distribution's entropy for a KL divergence, else 0


def over_all(smoothing: float, vocab_size: int) -> Target:
    """e / V for every token, the label included; cross entropy.

    Source: Szegedy et al. 2016, section 7; `torch.nn.functional.cross_entropy`, `optax.smooth_labels`.
    """
    share = smoothing / vocab_size
    return Target(1 - smoothing + share, share, share, 0.0)


def over_others(smoothing: float, vocab_size: int) -> Target:
    """e / (V - 1) for every token but the label; KL divergence. Source: tensor2tensor, flax's WMT example."""
    share = smoothing / _others(vocab_size - 1)
    return Target(1 - smoothing, share, share, _entropy(1 - smoothing, share, vocab_size - 1))


def over_others_but_padding(smoothing: float, vocab_size: int) -> Target:
    """e / (V - 2) for every token but the label and padding; KL divergence. Source: The Annotated Transformer."""
    share = smoothing / _others(vocab_size - 2)
    return Target(1 - smoothing, share, 0.0, _entropy(1 - smoothing, share, vocab_size - 2))


def _others(count: int) -> int:
    if count < 1:
        raise ConfigError("label_smoothing: the vocabulary has no other token that could share it")
    return count


def _entropy(label: float, share: float, others: int) -> float:
    return -sum(n * p * math.log(p) for n, p in ((1, label), (others, share)) if p > 0)


SMOOTHINGS: dict[str, Callable[[float, int], Target]] = {
    "all": over_all,
    "others": over_others,
    "others_but_padding": over_others_but_padding,
}
