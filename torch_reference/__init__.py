"""The Transformer in plain PyTorch. `flax_transformer` has the same files, classes and attribute names."""

from ..backend.submodules import lazy_attributes
from ..backend.torch_package import require_torch

require_torch("twinax.torch_reference")

from .decode import generate  # noqa: E402
from .dropout import DropoutKey  # noqa: E402
from .model import Transformer  # noqa: E402
from .module import activations  # noqa: E402
from .scoring import attention_maps, score  # noqa: E402

__all__ = ["DropoutKey", "Transformer", "activations", "attention_maps", "generate", "score"]

__getattr__ = lazy_attributes(__name__)
