"""The command `twinax plan`, its report and its picture."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
