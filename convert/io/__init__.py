"""Files: atomic writing, checksums, safetensors, first bytes, and limits for what others wrote."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
