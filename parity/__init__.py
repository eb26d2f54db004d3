"""Proves that two models compute the same function.

`compare_arrays` compares the outputs of any two functions, and `diagnose` finds where two models part.
"""

from .diagnosis import Diagnosis, diagnose
from .harness import Criterion, Finding, Report, compare_arrays

__all__ = ["Criterion", "Diagnosis", "Finding", "Report", "compare_arrays", "diagnose"]
