"""Formats of checkpoints, one per file, and their registry."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
