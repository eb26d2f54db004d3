"""What every room stands on: errors, XLA flags, a test of the compiler, memory, and caches."""

from .submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
