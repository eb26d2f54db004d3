"""Beam search compared token by token: both twins, `transformers`, and CTranslate2."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
