"""Formulas that both frameworks share, in NumPy or generic array arithmetic. Imports neither jax nor torch."""
