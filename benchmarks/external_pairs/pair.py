"""What a pair of models is, and its random parameters and masks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Pair:
    """A reference, a candidate that should be equal to it, and the inputs of both."""

    reference: Any
    candidate: Any
    inputs: tuple[Any, ...]
    candidate_inputs: tuple[Any, ...] | None = None  # where the candidate wants them otherwise


def random_parameters(module: nn.Module, seed: int = 0, scale: float = 0.4) -> None:
    """Draw every parameter and buffer of floating point anew, so that no bias is 0 and no gain 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))


def keep_mask(batch: int, length: int) -> np.ndarray:
    """True where a position is no padding: the first row is full, each other is one shorter than the one before."""
    return np.arange(length) < length - np.arange(batch)[:, None]
