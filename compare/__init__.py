"""Finds where any two models diverge, with the lines of both sides.

`compare` and `diagnose` compare two models; `assert_same_function` is the test. `infer_weights` finds which parameter
comes from which, and `probe_converter` what a converter does.
"""

from typing import TYPE_CHECKING

from ..backend.submodules import lazy_attributes

if TYPE_CHECKING:
    from .comparison import Comparison, compare
    from .repair.diagnosis import Diagnosis, diagnose
    from .testing import DifferentFunctionError, assert_same_function
    from .weight_map.inference import Inference, infer_weights
    from .weight_map.probing import probe_converter

__all__ = [
    "Comparison",
    "Diagnosis",
    "DifferentFunctionError",
    "Inference",
    "assert_same_function",
    "compare",
    "diagnose",
    "infer_weights",
    "probe_converter",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(("Comparison", "compare"), "comparison"),
        **dict.fromkeys(("Diagnosis", "diagnose"), "repair.diagnosis"),
        **dict.fromkeys(("Inference", "infer_weights"), "weight_map.inference"),
        **dict.fromkeys(("DifferentFunctionError", "assert_same_function"), "testing"),
        "probe_converter": "weight_map.probing",
    },
)
