"""Forms of ordinary operations that XLA computes fast on a CPU."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
