"""The process of the command: imports, streams, messages, and its exit status."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
