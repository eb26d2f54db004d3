"""Metrics of a run as JSON lines, TensorBoard, SwanLab and a plot; progress on a terminal."""
