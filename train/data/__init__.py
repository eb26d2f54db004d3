"""From text to batches: corpora, tokenizers, batch shapes and batch order."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
