"""Ready-made models and runs by name. Imports neither jax nor torch."""

from ..backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
