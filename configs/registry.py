"""Lazy registries of presets and published systems, and modules of `train` that `convert` uses.

The modules that define them import the configs, so the configs cannot import them. `twinax` registers their locations
here, and the first look-up imports them.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from ..backend.errors import ConfigError


class Registry(Mapping[str, Any]):
    """A mapping of another module, imported on first use."""

    def __init__(self, kind: str):
        """`kind` names the values in messages, as in "preset='tny': there is no such preset"."""
        self._kind = kind
        self._place: str | None = None

    def register(self, place: str) -> None:
        """Set the location of the mapping, `package.module:NAME`."""
        self._place = place

    def find(self, argument: str, name: str) -> Any:
        """The value of a name. Raises: ConfigError, which names the argument and lists all names."""
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


PRESETS = Registry("preset")  # models
PUBLISHED = Registry("system")  # recipes of published systems
PUBLISHED_LAYOUTS = Registry("system")  # layouts of their state dicts
LATER_MODULES: dict[str, str] = {}  # by name, those that import the modules which need them


def later_module(name: str) -> ModuleType:
    """A module of `LATER_MODULES`, imported on first use."""
    return import_module(LATER_MODULES[name])
