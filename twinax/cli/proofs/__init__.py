"""Commands that prove or find a difference: parity, compare and audit."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
