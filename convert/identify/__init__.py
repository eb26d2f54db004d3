"""What a file or directory is that twinax cannot read."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
