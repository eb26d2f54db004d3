"""Checkpoints of a run and its directory."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
