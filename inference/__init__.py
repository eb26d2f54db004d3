"""Trained models: translation, scores, and attention plots."""

from ..backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
