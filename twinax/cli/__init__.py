"""The command `twinax`."""

from ..backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"main": "commands"})
