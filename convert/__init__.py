"""Conversion of weights between the two frameworks, and between checkpoint layouts."""

from typing import TYPE_CHECKING

from ..backend.errors import ConversionError
from ..backend.submodules import lazy_attributes
from ..configs.verification import verifying
from .checkpoint import Checkpoint, checksum
from .formats.hugging_face import family
from .formats.registry import load, save
from .optimizers.adam import to_optax_state, to_optimizer_state
from .port import to_flax, to_params, to_state_dict, to_torch

if TYPE_CHECKING:
    from .user_module import from_module, module_state_dict

__all__ = [
    "Checkpoint",
    "ConversionError",
    "checksum",
    "family",
    "from_module",
    "load",
    "module_state_dict",
    "save",
    "to_flax",
    "to_optax_state",
    "to_optimizer_state",
    "to_params",
    "to_state_dict",
    "to_torch",
    "verifying",
]

# these import torch
__getattr__ = lazy_attributes(__name__, {"from_module": "user_module", "module_state_dict": "user_module"})
