"""Formulas that both frameworks share, in NumPy or in arithmetic that either one's arrays have. Imports neither."""
