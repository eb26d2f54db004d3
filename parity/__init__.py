"""Proves that two models compute the same function.

`compare_arrays` compares the outputs of any two functions, and `diagnose` finds where two models part. `infer_weights`
finds which parameter comes from which, and `probe_converter` what a converter does.
"""

from .diagnosis import Diagnosis, diagnose
from .harness import Criterion, Finding, Report, compare_arrays
from .inference import Inference, infer_weights
from .probing import probe_converter

__all__ = [
    "Criterion",
    "Diagnosis",
    "Finding",
    "Inference",
    "Report",
    "compare_arrays",
    "diagnose",
    "infer_weights",
    "probe_converter",
]
