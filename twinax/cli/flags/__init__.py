"""Flags: of runs, of other tools, and their help."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
