"""Proves that two models compute the same function.

`compare_arrays` compares the outputs of any two functions; `compare` and `diagnose` find where two models part.
"""

from .comparison import Comparison, assert_same_function, compare
from .diagnosis import Diagnosis, diagnose
from .harness import Criterion, Finding, Report, compare_arrays

__all__ = [
    "Comparison",
    "Criterion",
    "Diagnosis",
    "Finding",
    "Report",
    "assert_same_function",
    "compare",
    "compare_arrays",
    "diagnose",
]
