"""The published systems by name, and their parts, imported on first use."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..backend.errors import ConfigError
from ..configs.decoding import DecodingConfig
from ..configs.registry import PUBLISHED
from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from .recipe import Recipe

if TYPE_CHECKING:
    from ..convert.layouts.published import PublishedLayout
    from .oracle import Oracle

SYSTEMS = tuple(module.name for module in iter_modules([str(Path(__file__).parent)]) if module.ispkg)


class _Part(Mapping[str, Any]):
    """One part of every system: the value `NAME` of the module `name` in its folder."""

    def __init__(self, name: str):
        self._name = name

    def __getitem__(self, system: str) -> Any:
        if system not in SYSTEMS:
            raise KeyError(system)
        return getattr(import_module(f".{system}.{self._name}", __package__), self._name.upper())

    def __iter__(self) -> Iterator[str]:
        return iter(SYSTEMS)

    def __len__(self) -> int:
        return len(SYSTEMS)


RECIPES: Mapping[str, Recipe] = _Part("recipe")
LAYOUTS: "Mapping[str, PublishedLayout]" = _Part("layout")
ORACLES: "Mapping[str, Oracle]" = _Part("oracle")


def recipe(name: str, *, as_published: bool) -> RunConfig:
    """A system's complete training run: data, tokenizers, model, optimizer, schedule and length.

    Raises:
        ConfigError: there is no such system.
    """
    return PUBLISHED.find("published", name).run(as_published)


def as_decoded(name: str, model: TransformerConfig, *, as_published: bool) -> tuple[TransformerConfig, DecodingConfig]:
    """(model as a system's decoding computes it, its decoding).

    Raises:
        ConfigError: there is no such system, it has no published decoding, or it has no such model.
    """
    result = RECIPES[name].as_decoded(model, as_published=as_published) if name in SYSTEMS else None
    if result is None:
        names = ", ".join(system for system, recipe in RECIPES.items() if recipe.decoding is not None)
        raise ConfigError(f"published={name!r}: has no published decoding; choose one of {names}")
    return result
