"""Layouts of foreign checkpoints: for each, a table of rules between Flax names and its names."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
