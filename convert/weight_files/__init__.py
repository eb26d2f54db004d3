"""Weight files of other programs: their forms, and what those put around the names of arrays."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
