"""Metrics of a run as JSON lines, TensorBoard, SwanLab and a plot; progress on a terminal."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
