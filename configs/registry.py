"""Values by name that are made of the configs: presets, and what is known of published systems.

What defines them imports the configs; the configs find them here, by the place that `twinax` registered, when the first
one is asked for.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from .errors import ConfigError


class Registry(Mapping[str, Any]):
    """A mapping of another module, imported on first use."""

    def __init__(self, kind: str):
        """`kind`: what a value is, as in "preset='tny': there is no such preset"."""
        self._kind = kind
        self._place: str | None = None

    def register(self, place: str) -> None:
        """Takes the mapping at `package.module:NAME`."""
        self._place = place

    def find(self, argument: str, name: str) -> Any:
        """The value of a name. Raises: ConfigError, which names the argument and every name that there is."""
        if name not in self:
            raise ConfigError(f"{argument}={name!r}: there is no such {self._kind}; choose one of {', '.join(self)}")
        return self[name]

    @property
    def _values(self) -> Mapping[str, Any]:
        if self._place is None:
            return {}
        module, _, attribute = self._place.partition(":")
        return getattr(import_module(module), attribute)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


PRESETS = Registry("preset")  # of models
PUBLISHED = Registry("system")  # recipes of published systems
PUBLISHED_LAYOUTS = Registry("system")  # and the layouts of their state dicts
CHECKPOINT_FORMATS = Registry("format")  # of a training's own checkpoints, beside those that `convert` has
