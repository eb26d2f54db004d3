"""Proves that two models compute the same function.

`compare_arrays` compares the outputs of any two functions; `compare` and `diagnose` find where two models diverge.
`infer_weights` finds which parameter comes from which, and `probe_converter` what a converter does.
"""

from ..configs.submodules import lazy_attributes
from .comparison import Comparison, assert_same_function, compare
from .diagnosis import Diagnosis, diagnose
from .harness import Criterion, Finding, Report, compare_arrays
from .inference import Inference, infer_weights
from .probing import probe_converter

__all__ = [
    "Comparison",
    "Criterion",
    "Diagnosis",
    "Finding",
    "Inference",
    "Report",
    "assert_same_function",
    "compare",
    "compare_arrays",
    "diagnose",
    "infer_weights",
    "probe_converter",
]

__getattr__ = lazy_attributes(__name__)
