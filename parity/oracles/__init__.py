"""Independent implementations, with which both twins are compared."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
