"""Records what a model computes, in PyTorch and in JAX, without changing its code.

Imports NumPy, and PyTorch or JAX: it runs beside whatever versions a model needs.
"""
