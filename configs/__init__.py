"""What a model is: frozen dataclasses that both frameworks read. Imports neither jax nor torch."""

from .schema import SCHEMA_VERSION, ConfigError, TransformerConfig

__all__ = ["SCHEMA_VERSION", "ConfigError", "TransformerConfig"]
