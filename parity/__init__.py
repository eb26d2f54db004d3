"""Proves that two models compute the same function; `compare_arrays` compares any two functions."""

from .harness import Criterion, Finding, Report, compare_arrays

__all__ = ["Criterion", "Finding", "Report", "compare_arrays"]
