"""The training loop, validation, and what it starts from and stops for."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"train": "loop"})
