"""Configs of models, data and training: frozen dataclasses for both frameworks. Imports neither jax nor torch."""

from ..backend.errors import ConfigError
from ..backend.submodules import lazy_attributes
from .schema import SCHEMA_VERSION, TransformerConfig

__all__ = ["SCHEMA_VERSION", "ConfigError", "TransformerConfig"]

__getattr__ = lazy_attributes(__name__)
