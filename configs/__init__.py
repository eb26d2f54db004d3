"""Configs of models, data and training: frozen dataclasses for both frameworks. Imports neither jax nor torch."""

from .errors import ConfigError
from .schema import SCHEMA_VERSION, TransformerConfig
from .submodules import lazy_attributes

__all__ = ["SCHEMA_VERSION", "ConfigError", "TransformerConfig"]

__getattr__ = lazy_attributes(__name__)
