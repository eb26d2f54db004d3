"""Proves that the twins compute the same function.

`compare_arrays` compares the outputs of any two functions. The functions of `twinax.compare` are here too.
"""

from typing import TYPE_CHECKING

from ..backend.submodules import lazy_attributes

if TYPE_CHECKING:
    from ..compare import (
        Comparison,
        Diagnosis,
        Inference,
        assert_same_function,
        compare,
        diagnose,
        infer_weights,
        probe_converter,
    )
    from .harness import Criterion, Finding, Report, compare_arrays

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

_HARNESS = ("Criterion", "Finding", "Report", "compare_arrays")
__getattr__ = lazy_attributes(__name__, {name: ".harness" if name in _HARNESS else "..compare" for name in __all__})
