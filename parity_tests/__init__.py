"""The proof that two models are one function; `compare` serves any two functions."""

from .harness import Criterion, Finding, Report, compare

__all__ = ["Criterion", "Finding", "Report", "compare"]
