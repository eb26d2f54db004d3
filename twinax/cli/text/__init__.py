"""Commands on text: translate, score, evaluate, and beam search by several backends."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
