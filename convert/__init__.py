"""Weights between the two frameworks, and between layouts."""

from .port import to_flax, to_params, to_state_dict, to_torch
from .rules import ConversionError

__all__ = ["ConversionError", "to_flax", "to_params", "to_state_dict", "to_torch"]
