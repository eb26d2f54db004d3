"""Cost of a training run on devices that this machine lacks: memory, FLOPs, communication, and a bound on its time."""

from ..backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
