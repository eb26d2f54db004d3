"""Conversion of weights between the two frameworks, and between checkpoint layouts."""

from ..configs.errors import ConversionError
from ..configs.verification import verifying
from .checkpoint import Checkpoint, checksum
from .formats import load, save
from .hugging_face import family
from .optimizer import to_optax_state, to_optimizer_state
from .port import to_flax, to_params, to_state_dict, to_torch

__all__ = [
    "Checkpoint",
    "ConversionError",
    "checksum",
    "family",
    "load",
    "save",
    "to_flax",
    "to_optax_state",
    "to_optimizer_state",
    "to_params",
    "to_state_dict",
    "to_torch",
    "verifying",
]
