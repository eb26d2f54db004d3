"""Training in JAX."""

from ..configs.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
