"""What a run records: metrics as JSON lines, TensorBoard, SwanLab and a plot, and progress on a terminal."""
