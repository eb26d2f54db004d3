"""Which values of two traces are the same numbers in the same arrangement, and how far apart the others are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from .capture.trace import Operation, Trace
from .layouts import find_layout

Array = np.ndarray
EXACT = 1e-9  # a correct port in float64 stays below it
ROUNDED = 3e-6  # one whose constants were rounded to float32 below this
_FEW = 4  # values with fewer different numbers identify nothing


class Signature(NamedTuple):
    """What identifies a value whatever its arrangement: its numbers in order of size."""

    size: int
    scale: float  # the largest |number|
    rms: float
    ordered: Array


def signature(value: Array) -> Signature | None:
    """None for values that identify nothing: integers, booleans, and those with few different numbers."""
    if value.dtype.kind != "f" or value.size < _FEW:
        return None
    finite = value[np.isfinite(value)] if not np.isfinite(value).all() else value
    ordered = np.sort(finite, axis=None)
    if len(ordered) < _FEW or len(np.unique(ordered)) < _FEW:
        return None
    scale = float(np.abs(ordered[[0, -1]]).max())
    return Signature(value.size, scale, scale * float(np.sqrt(np.square(ordered / scale).mean())), ordered)


def distance(one: Signature, other: Signature) -> float:
    """Largest difference of the ordered numbers, relative to the largest number."""
    if one.size != other.size or len(one.ordered) != len(other.ordered):
        return float("inf")
    return float(np.abs(one.ordered - other.ordered).max() / max(one.scale, other.scale))


@dataclass(frozen=True)
class Matches:
    """Numbers of a reference's values and of a candidate's that are equal in this bound, each way."""

    of_reference: Mapping[int, tuple[int, ...]]
    of_candidate: Mapping[int, tuple[int, ...]]


class Signatures:
    """The signatures of a trace, each computed once."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.by_number = {i: s for i, value in enumerate(trace.values) if (s := signature(value)) is not None}
        self.by_size: dict[int, list[int]] = {}
        for number, one in self.by_number.items():
            self.by_size.setdefault(one.size, []).append(number)


def match_values(reference: Signatures, candidate: Signatures, bound: float = EXACT) -> Matches:
    """All pairs of values with the same numbers, arranged by axes: a shuffle is no match."""
    forward: dict[int, tuple[int, ...]] = {}
    backward: dict[int, tuple[int, ...]] = {}
    for size, numbers in reference.by_size.items():
        others = sorted((candidate.by_number[n].rms, n) for n in candidate.by_size.get(size, ()))
        sizes = np.array([rms for rms, _ in others])
        for number in numbers:
            one = reference.by_number[number]
            slack = bound * one.scale
            low, high = np.searchsorted(sizes, [one.rms - slack, one.rms + slack])
            partners = tuple(
                n
                for _, n in others[low:high]
                if distance(one, candidate.by_number[n]) <= bound
                and arranged(reference.trace.values[number], candidate.trace.values[n], bound)
            )
            if partners:
                forward[number] = partners
                for n in partners:
                    backward[n] = (*backward.get(n, ()), number)
    return Matches(forward, backward)


def arranged(one: Array, other: Array, bound: float) -> bool:
    """Whether `other` is an arrangement of the axes of `one`; both have the same numbers within the bound."""
    flat, target = np.ravel(one), np.ravel(other)
    scale = bound * max(float(np.abs(flat[np.isfinite(flat)]).max(initial=0)), 1e-300)
    if one.shape == other.shape and _close(flat, target, scale):
        return True
    order, order_of_other = np.argsort(flat, kind="stable"), np.argsort(target, kind="stable")
    index = np.empty(flat.size, np.int64)
    index[order_of_other] = order
    ordered = flat[order]
    tied = np.zeros(flat.size, bool)
    with np.errstate(invalid="ignore"):  # infinities are ties
        near = ~(np.diff(ordered) > 2 * scale)
    tied[1:] |= near
    tied[:-1] |= near
    index[order_of_other[tied]] = -1
    layout = find_layout(index.reshape(other.shape), flat.size) if (~tied).any() else None
    return layout is not None and _close(np.ravel(layout.apply(one)), target, scale)


def same_order(one: Array, other: Array, bound: float) -> bool:
    """Whether both have the same numbers in the same flat order, whatever their shapes."""
    scale = bound * max(float(np.abs(one[np.isfinite(one)]).max(initial=0)), 1e-300)
    return one.size == other.size and _close(np.ravel(one), np.ravel(other), scale)


def _close(one: Array, other: Array, slack: float) -> bool:
    same = np.isclose(one, other, rtol=0, atol=slack, equal_nan=True)
    return bool(same.all())


def alignments(value: Array, target: Array) -> list[Array]:
    """`value` in the shape of `target`: reshaped, and in the arrangement of axes in which they are closest."""
    possible = [(float(np.square(difference(a, target)).sum()), a) for a in _arrangements(value, target.shape)]
    if not possible:
        return []
    closest, plain = min(possible, key=lambda entry: entry[0])[1], possible[0][1]
    return [closest] if np.array_equal(closest, plain, equal_nan=True) else [closest, plain]


def difference(one: Array, other: Array) -> Array:
    """|one - other|; where one is infinite or NaN and the other is not, ten times the largest finite number."""
    finite = np.isfinite(one) & np.isfinite(other)
    same = finite | (one == other) | (np.isnan(one) & np.isnan(other))
    numbers = [np.where(finite, array, 0.0) for array in (one, other)]
    largest = max(float(np.abs(array).max(initial=0)) for array in numbers)
    return np.where(same, np.abs(numbers[0] - numbers[1]), 10 * largest)


def _arrangements(value: Array, shape: Sequence[int]) -> Iterator[Array]:
    """Reshapes of all orders of the axes of either; the plain reshape first."""
    if value.size != int(np.prod(shape)):
        return
    for order in permutations(range(value.ndim)):
        yield value.transpose(order).reshape(shape)
    for order in permutations(range(len(shape))):
        back = np.argsort(order)
        yield value.reshape([shape[i] for i in order]).transpose(back)


def suspects(trace: Trace, matched: Mapping[int, tuple[int, ...]], outputs: Iterable[int]) -> set[int]:
    """Unmatched values from which one of these outputs, which differ, is reached through unmatched values alone.

    What lies between matched values, such as the steps of a norm that the other framework has as one operation, is
    thereby no fault.
    """
    suspect = set(outputs)
    for operation in reversed(trace.operations):
        if not suspect.isdisjoint(operation.outputs):
            suspect.update(number for number in operation.inputs if number not in matched)
    fixed = {*trace.parameters.values(), *trace.inputs.values()}
    return {number for number in suspect if number not in fixed}


def producers(trace: Trace) -> dict[int, Operation]:
    """The operation that computed each value."""
    return {number: operation for operation in trace.operations for number in operation.outputs}
