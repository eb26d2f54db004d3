"""The Transformer in functional Flax NNX; `torch_reference` has the same files, classes and attribute names."""

from .dropout import DropoutKey
from .model import Transformer
from .module import Buffer, activations, named_arrays

__all__ = ["Buffer", "DropoutKey", "Transformer", "activations", "named_arrays"]
