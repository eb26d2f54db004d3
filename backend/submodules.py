"""Submodules as attributes of their package, loaded on first use: `twinax.train.step.step` after `import twinax`."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, sources: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A package's `__getattr__`: its submodules by name, and objects by the name of the module that defines them.

    `sources`: names of modules, relative to the package: `"step"`, or `"..compare"` for one beside the package.
    """
    sources = sources or {}

    def get(name: str) -> Any:
        if name in sources:
            return getattr(importlib.import_module(f".{sources[name].removeprefix('.')}", package), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
