"""Commands on checkpoints: convert and inspect."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
