"""Several processes of one run: how they find each other, agree, and end together."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
