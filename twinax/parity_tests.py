"""Former module of `twinax.parity` and `twinax.audit`; its names can still be imported, with a warning each."""

import warnings
from importlib import import_module
from typing import Any

# old name -> (module, new name)
_NEW_NAMES = {
    "compare": ("twinax.parity", "compare_arrays"),
    **{name: ("twinax.parity", name) for name in ("Criterion", "Finding", "Report")},
    **{name: ("twinax.audit", name) for name in ("assert_healthy", "audit")},
}


def __getattr__(name: str) -> Any:
    if name not in _NEW_NAMES:
        raise AttributeError(f"module 'twinax.parity_tests' has no attribute {name!r}")
    module, new = _NEW_NAMES[name]
    warnings.warn(f"twinax.parity_tests.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(module), new)
