"""Formulas that both frameworks share, in NumPy or generic array arithmetic. Imports neither jax nor torch."""

from ..backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
