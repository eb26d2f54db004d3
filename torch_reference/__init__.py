"""The Transformer in plain PyTorch. `flax_transformer` has the same files, classes and attribute names."""

from typing import TYPE_CHECKING

from ..backend.submodules import lazy_attributes
from ..backend.torch_package import require_torch

if TYPE_CHECKING:
    from .decoding.scoring import attention_maps, score
    from .decoding.search import generate, generate_together
    from .dropout import DropoutKey
    from .model import Transformer
    from .module import activations

__all__ = ["DropoutKey", "Transformer", "activations", "attention_maps", "generate", "generate_together", "score"]

require_torch("twinax.torch_reference")
__getattr__ = lazy_attributes(
    __name__,
    {
        "DropoutKey": "dropout",
        "Transformer": "model",
        "activations": "module",
        **dict.fromkeys(("generate", "generate_together"), "decoding.search"),
        **dict.fromkeys(("attention_maps", "score"), "decoding.scoring"),
    },
)
