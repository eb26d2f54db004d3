"""Commands on runs: train and data."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
