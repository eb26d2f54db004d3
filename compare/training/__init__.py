"""What training adds to a comparison: gradients, dropout masks, and updates."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
