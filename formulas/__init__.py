"""Formulas that both frameworks share, in NumPy or generic array arithmetic. Imports neither jax nor torch."""

from ..configs.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
