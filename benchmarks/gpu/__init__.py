"""What a GPU or TPU computes, and how fast: `python -m benchmarks.gpu`."""
