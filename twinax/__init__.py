"""Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal.

Subpackages are loaded on first use: `import twinax` imports neither jax nor torch.
"""

import sys
from typing import TYPE_CHECKING, Any

from .backend.submodules import lazy_attributes
from .backend.xla_flags import avoid_wrong_sums
from .configs import registry
from .renamed import RenamedModules

if TYPE_CHECKING:
    from .configs import TransformerConfig as TransformerConfig
    from .inference.translator import load as load

__version__ = "0.1.0"

_PUBLIC = {"TransformerConfig": "configs", "load": "inference.translator"}
_SUBPACKAGES = (
    *("audit", "backend", "compare", "configs", "convert", "flax_transformer", "formulas", "inference", "parity"),
    *("planning", "presets", "published", "torch_reference", "train"),
)
_attribute = lazy_attributes(__name__, _PUBLIC)
sys.meta_path.append(RenamedModules())
avoid_wrong_sums()  # before JAX starts a backend
# Objects that the configs and `convert` look up by name and import on use.
registry.PRESETS.register("twinax.presets.models:PRESETS")
registry.PUBLISHED.register("twinax.published.registry:RECIPES")
registry.PUBLISHED_LAYOUTS.register("twinax.published.registry:LAYOUTS")
registry.LATER_MODULES["runs"] = "twinax.train.checkpointing.orbax_format"
registry.LATER_MODULES["vocabularies"] = "twinax.train.data.vocabularies"


def __getattr__(name: str) -> Any:
    return _attribute(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_SUBPACKAGES})
