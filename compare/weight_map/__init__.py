"""Which parameter of a candidate comes from which of its reference, inferred or probed."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
