"""Modules that moved, importable under the names that earlier pages of the documentation used."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader

RENAMED = {
    "twinax.attention_plot": "twinax.inference.attention_plot",
    "twinax.parity.comparison_page": "twinax.compare.page",
    "twinax.parity.comparison_report": "twinax.compare.report",
    "twinax.train.compilation_cache": "twinax.backend.compilation_cache",
    "twinax.train.data.tokenization": "twinax.train.text.tokenization",
    "twinax.train.partitioning": "twinax.train.step.partitioning",
}


class RenamedModules(MetaPathFinder, Loader):
    """Finds a module of `RENAMED` under its former name: both names are the same module."""

    def find_spec(self, fullname, path=None, target=None):
        """Return a spec if the module moved."""
        return spec_from_loader(fullname, self) if fullname in RENAMED else None

    def exec_module(self, module):
        """Put the module that moved in the place of the new, empty one."""
        name = RENAMED[module.__name__]
        warnings.warn(f"{module.__name__} is now {name}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(name)
