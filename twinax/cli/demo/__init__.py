"""The command `twinax demo`, and the language that it teaches."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
