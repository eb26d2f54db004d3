"""The proof that two models are one function; `compare_arrays` serves any two functions."""

from .harness import Criterion, Finding, Report, compare_arrays

__all__ = ["Criterion", "Finding", "Report", "compare_arrays"]
