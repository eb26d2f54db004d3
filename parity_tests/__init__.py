"""The proof that two models are one function; `compare` serves any two functions."""

import importlib
from typing import Any

from .harness import Criterion, Finding, Report, compare

__all__ = ["Criterion", "Finding", "Report", "compare"]


def __getattr__(name: str) -> Any:
    if name in ("assert_healthy", "audit"):  # from `auditing`, which imports torch
        return getattr(importlib.import_module("twinax.parity_tests.auditing"), name)
    raise AttributeError(f"module 'twinax.parity_tests' has no attribute {name!r}")
