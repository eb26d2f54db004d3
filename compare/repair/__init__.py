"""Where two traces diverge, and the change that makes them equal."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
