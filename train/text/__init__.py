"""Text: corpora, and tokenizers from text to ids and back."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
