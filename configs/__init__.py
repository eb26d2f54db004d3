"""What a model is: frozen dataclasses that both frameworks read. Imports neither jax nor torch."""

from .errors import ConfigError
from .schema import SCHEMA_VERSION, TransformerConfig

__all__ = ["SCHEMA_VERSION", "ConfigError", "TransformerConfig"]
