"""Arrays of either framework as numpy arrays: bit-exact, on demand, and of other dtypes."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"from_torch": "frameworks"})
