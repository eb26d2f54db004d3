"""Errors in float64 as a heat map, with a row per array and a column per layer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .harness import Finding, Report

# Errors relative to the tolerance up to which a color is used; the last color is of larger ones.
BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e2, 1e4, 1e6, 1e8, 1e10)
# Red, green, blue and opacity, which is legible on light and dark backgrounds.
COLORS = (
    *((37, 99, 235, opacity) for opacity in (0, 25, 45, 65, 85, 105, 125)),
    *((220, 50, 47, opacity) for opacity in (60, 90, 120, 150, 180, 205)),
)
_COLUMNS = 12  # layers beside each other, as many as fit on paper
_LAYER = re.compile(r"(gradients\.)?(encoder|decoder)\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Row:
    """An array of some layers; None where a layer lacks it."""

    array: str
    findings: tuple[Finding | None, ...]


@dataclass(frozen=True)
class Block:
    """Consecutive layers of a stack, with their rows by rung."""

    stack: str  # encoder or decoder
    layers: tuple[int, ...]
    rows: dict[str, list[Row]]


def levels(errors: Any, tolerance: float) -> np.ndarray:
    """The index of the color of each error, 0 for the smallest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(np.equal(errors, 0), 0.0, np.asarray(errors, np.float64) / tolerance)
    return np.searchsorted(BOUNDS, ratios)  # NaN is larger than all


def blocks(report: Report) -> Iterator[Block]:
    """The arrays of the layers, in the order of the report."""
    stacks: dict[str, dict[str, dict[str, dict[int, Finding]]]] = {}  # stack -> rung -> array -> layer
    for finding in report.findings:
        if (match := _LAYER.fullmatch(finding.path)) is not None:
            _, stack, layer, array = match.groups()
            rungs = stacks.setdefault(stack, {})
            rungs.setdefault(finding.rung, {}).setdefault(array, {})[int(layer)] = finding
    for stack, rungs in stacks.items():
        count = 1 + max(layer for arrays in rungs.values() for layers in arrays.values() for layer in layers)
        for start in range(0, count, _COLUMNS):
            layers = tuple(range(start, min(start + _COLUMNS, count)))
            rows = {
                rung: [Row(array, tuple(map(by_layer.get, layers))) for array, by_layer in arrays.items()]
                for rung, arrays in rungs.items()
            }
            yield Block(stack, layers, rows)


def outside_layers(report: Report) -> list[Finding]:
    """The arrays that belong to no layer."""
    return [finding for finding in report.findings if _LAYER.fullmatch(finding.path) is None]
