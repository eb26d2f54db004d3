"""Compares the outputs of two functions array by array, aligned by path, and reports the worst elements.

It is independent of the model: `compare_arrays(f, g, x, criteria=...)` takes any two functions that return trees of
arrays with the same structure, from JAX, PyTorch or numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Tree = Any


@dataclass(frozen=True)
class Criterion:
    """The tolerance of a rung, bound · scale, and the reason for it.

    The scale is 1, max(1, the array's largest `|reference|`), or the largest `|reference|` in the whole rung.
    """

    rung: str
    bound: float
    scale: Literal["one", "array", "rung"]
    reason: str


@dataclass(frozen=True)
class Finding:
    """The worst element of one array, or the reason that two arrays cannot be compared."""

    path: str
    rung: str
    index: tuple[int, ...] = ()
    reference: float = float("nan")
    candidate: float = float("nan")
    error: float = float("inf")
    tolerance: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; NaN never is, infinity only if both arrays have it."""
        return not self.problem and self.error <= self.tolerance

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path}: {self.problem}"
        element = f"{self.path}{list(self.index)}"
        values = f"reference {self.reference!r}, candidate {self.candidate!r}"
        return f"{element}: {values}, difference {self.error:.3g}, tolerance {self.tolerance:.3g}"


@dataclass(frozen=True)
class Report:
    """The findings of a comparison, one per path, in the order in which the reference returns them."""

    findings: tuple[Finding, ...]
    criteria: tuple[Criterion, ...]
    reproduce: str = ""

    @property
    def ok(self) -> bool:
        """Whether every array is within its tolerance and at least one was compared."""
        return bool(self.findings) and all(f.ok for f in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings outside their tolerance."""
        return tuple(f for f in self.findings if not f.ok)

    @property
    def failed_rung(self) -> str | None:
        """The first rung that fails."""
        return next((c.rung for c in self.criteria if any(f.rung == c.rung for f in self.failures)), None)

    @property
    def first(self) -> Finding | None:
        """The first array that differs, in the order of the computation."""
        return next(iter(self.failures), None)

    def worst(self, rung: str) -> Finding | None:
        """The finding of a rung with the largest error relative to its tolerance."""
        findings = [f for f in self.findings if f.rung == rung]
        return max(findings, key=_severity) if findings else None

    def check(self) -> None:
        """Raises: AssertionError with the first failing rung, its worst elements, and how to reproduce it."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        if self.ok:
            return f"equal: {len(self.findings)} arrays within their tolerances"
        if not self.findings:
            return "nothing was compared: both functions returned no arrays"
        rung = self.failed_rung
        reason = next(c.reason for c in self.criteria if c.rung == rung)
        failures = sorted((f for f in self.failures if f.rung == rung), key=_severity, reverse=True)
        lines = [f"{len(self.failures)} of {len(self.findings)} arrays differ, first in rung '{rung}' ({reason}):"]
        lines += [f"  {finding}" for finding in failures[:5]]
        lines += [f"  … and {len(failures) - 5} more in this rung"] if len(failures) > 5 else []
        lines += [f"first differing array in computation order: {self.first.path}"] if self.first else []
        lines += [f"reproduce: {self.reproduce}"] if self.reproduce else []
        return "\n".join(lines)


def compare_arrays(
    reference: Callable[..., Tree] | Tree,
    candidate: Callable[..., Tree] | Tree,
    *inputs: Any,
    criteria: Sequence[Criterion],
    rung_of: Callable[[str], str] | None = None,
    reproduce: str = "",
) -> Report:
    """Call both functions on the same inputs, or take two trees directly, and compare the results.

    `rung_of` maps a path to its rung; without it every array is in the first criterion's rung.
    """
    trees = [flatten(side(*inputs) if callable(side) else side) for side in (reference, candidate)]
    if not criteria:
        raise ValueError("criteria: must have at least one criterion")
    by_rung = {criterion.rung: criterion for criterion in criteria}
    rungs = {path: rung_of(path) if rung_of else criteria[0].rung for path in (*trees[0], *trees[1])}
    if unknown := sorted(set(rungs.values()) - set(by_rung)):
        raise ValueError(f"rung_of returns {', '.join(unknown)}, for which there is no criterion")
    largest = dict.fromkeys(by_rung, 0.0)
    for path, array in trees[0].items():
        largest[rungs[path]] = max(largest[rungs[path]], _largest(array))
    findings = [
        _finding(path, by_rung[rung], trees[0].get(path), trees[1].get(path), largest[rung])
        for path, rung in rungs.items()
    ]
    return Report(tuple(findings), tuple(criteria), reproduce)


def flatten(tree: Tree, path: str = "") -> dict[str, np.ndarray]:
    """The arrays of a tree by path, keys joined by dots, in the tree's order; floats become float64."""
    if isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        return {path: _to_numpy(tree)}
    flat: dict[str, np.ndarray] = {}
    for key, child in children:
        arrays = flatten(child, f"{path}.{key}" if path else str(key))
        if duplicates := sorted(set(flat) & set(arrays)):
            raise ValueError(f"the tree has two arrays with the path {duplicates[0]}")
        flat |= arrays
    return flat


def _to_numpy(leaf: Any) -> np.ndarray:
    if hasattr(leaf, "detach"):  # a torch tensor, without importing torch
        leaf = leaf.detach().cpu()
        leaf = leaf.double() if leaf.is_floating_point() else leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "biu":
        return array
    if array.dtype.kind in "cOSUM":
        raise ValueError(f"only real arrays can be compared, not {array.dtype}: {leaf!r}")
    return array.astype(np.float64)


def _largest(array: np.ndarray) -> float:
    """The largest finite magnitude; with an infinite scale every difference would be within tolerance."""
    array = array.astype(np.float64)
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _severity(finding: Finding) -> float:
    if finding.problem:
        return float("inf")
    return finding.error / max(finding.tolerance, 1e-300)


def _finding(
    path: str, criterion: Criterion, reference: np.ndarray | None, candidate: np.ndarray | None, rung_largest: float
) -> Finding:
    if reference is None or candidate is None:
        side = "reference" if reference is None else "candidate"
        return Finding(path, criterion.rung, problem=f"the {side} has no such array")
    if reference.shape != candidate.shape:
        shapes = f"reference {list(reference.shape)}, candidate {list(candidate.shape)}"
        return Finding(path, criterion.rung, problem=f"shapes differ: {shapes}")
    scales: Mapping[str, float] = {"one": 1.0, "array": max(1.0, _largest(reference)), "rung": rung_largest}
    tolerance = criterion.bound * scales[criterion.scale]
    if reference.size == 0:
        return Finding(path, criterion.rung, error=0.0, tolerance=tolerance)
    with np.errstate(invalid="ignore"):
        error = np.abs(reference.astype(np.float64) - candidate.astype(np.float64))
    error = np.where(reference == candidate, 0.0, np.where(np.isfinite(error), error, np.inf))
    both_integers = reference.dtype.kind in "iu" and candidate.dtype.kind in "iu"
    error = np.where((reference != candidate) & both_integers, np.maximum(error, 1.0), error)
    flat = int(np.argmax(error))
    index = tuple(int(i) for i in np.unravel_index(flat, error.shape))
    values = (float(reference[index]), float(candidate[index]), float(error[index]))
    return Finding(path, criterion.rung, index, *values, tolerance)
