"""The Transformer in functional Flax NNX. `torch_reference` has the same files, classes and attribute names."""

from ..backend.submodules import lazy_attributes
from .decoding.scoring import attention_maps, score
from .decoding.search import Sentences, generate, generate_batches, generate_together
from .dropout import DropoutKey
from .model import Transformer
from .module import Buffer, activations, named_arrays

__all__ = [
    "Buffer",
    "DropoutKey",
    "Sentences",
    "Transformer",
    "activations",
    "attention_maps",
    "generate",
    "generate_batches",
    "generate_together",
    "named_arrays",
    "score",
]

__getattr__ = lazy_attributes(__name__)
