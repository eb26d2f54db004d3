"""The Transformer in plain PyTorch. `flax_transformer` has the same files, classes and attribute names."""

from ..backend.submodules import lazy_attributes
from .decode import generate
from .dropout import DropoutKey
from .model import Transformer
from .module import activations
from .scoring import attention_maps, score

__all__ = ["DropoutKey", "Transformer", "activations", "attention_maps", "generate", "score"]

__getattr__ = lazy_attributes(__name__)
