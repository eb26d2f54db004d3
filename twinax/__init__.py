"""Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal.

Subpackages are loaded on first use: `import twinax` imports neither jax nor torch.
"""

import importlib
from typing import Any

from .configs import registry
from .configs.submodules import lazy_attributes
from .train.xla_flags import avoid_wrong_sums

__version__ = "0.1.0"

_SUBPACKAGES = (
    *("audit", "configs", "convert", "flax_transformer", "formulas", "parity", "presets", "published"),
    *("torch_reference", "train"),
)
_submodule = lazy_attributes(__name__)
avoid_wrong_sums()  # before JAX starts a backend
# Objects that the configs and `convert` look up by name and import on use.
registry.PRESETS.register("twinax.presets.models:PRESETS")
registry.PUBLISHED.register("twinax.published.registry:RECIPES")
registry.PUBLISHED_LAYOUTS.register("twinax.published.registry:LAYOUTS")
registry.CHECKPOINT_FORMATS.register("twinax.train.checkpointing.orbax_format:FORMATS")
registry.VOCABULARIES.register("twinax.train.data.vocabularies:VOCABULARIES")


def __getattr__(name: str) -> Any:
    if name == "TransformerConfig":
        return importlib.import_module("twinax.configs").TransformerConfig
    if name == "load":
        return importlib.import_module("twinax.train.translator").load
    return _submodule(name)


def __dir__() -> list[str]:
    return sorted({*globals(), "TransformerConfig", "load", *_SUBPACKAGES})
