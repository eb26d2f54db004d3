"""The Transformer in plain PyTorch; `flax_transformer` has the same files, classes and attribute names."""

from .dropout import DropoutKey
from .model import Transformer
from .module import activations

__all__ = ["DropoutKey", "Transformer", "activations"]
