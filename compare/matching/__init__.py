"""Which values and parameters of two traces are the same numbers, however they are arranged."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
