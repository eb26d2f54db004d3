"""Applies a reference's dropout masks to a candidate, so that both can be compared in training mode."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from ..capture.models import capture
from ..capture.trace import CaptureError, Operation, Trace
from ..matching.matching import EXACT, find_arrangement, same_order
from ..repair.defect import Defect

Array = np.ndarray
_DEVIATIONS = 5  # standard deviations by which the shares of two masks differ if their rates do
_REMEDY = "only dropout masks are compared; disable all other random draws"


@dataclass(frozen=True)
class _Mask:
    """A dropout mask: zeros and ones, computed from random numbers."""

    number: int
    operation: Operation
    value: Array

    @property
    def place(self) -> str:
        return self.operation.line or self.operation.module or "the forward pass"

    @property
    def share(self) -> float:
        """The share of ones."""
        return float(np.mean(self.value))


def capture_in_training(
    models: tuple[Any, Any],
    inputs: tuple[Sequence[Any], Sequence[Any]],
    cotangents: tuple[Mapping[str, Array] | None, Mapping[str, Array] | None] = (None, None),
) -> tuple[Trace, Trace, tuple[Defect, ...]]:
    """Traces of two models in training mode with the same dropout masks, and where their dropout differs.

    Raises:
        CaptureError: a model cannot be traced, or draws random numbers that are no masks.
    """
    reference, candidate = (
        capture(model, given, factors, random=True)
        for model, given, factors in zip(models, inputs, cotangents, strict=True)
    )
    masks = _masks(reference), _masks(candidate)
    if not any(masks):
        raise CaptureError("neither model applies dropout; return both in training mode to compare their dropout")
    pairs = list(_pairs(*masks))
    differences = (*_unpaired(*masks, pairs), *_other_rates(pairs))
    reference, candidate = (_settled(trace, own) for trace, own in zip((reference, candidate), masks, strict=True))
    for one, other in pairs:
        value = _arranged(reference, candidate, one, other)
        for number, new in candidate.replay({other.number: value}).items():
            candidate.values[number] = new
    return reference, candidate, differences


def _masks(trace: Trace) -> list[_Mask]:
    """The masks on which outputs depend, in the order of execution."""
    random: set[int] = set()
    masks = []
    for operation in trace.operations:
        if operation.name in trace.random or not random.isdisjoint(operation.inputs):
            for number in operation.outputs:
                if _is_mask(trace.values[number]):
                    masks.append(_Mask(number, operation, trace.values[number]))
                else:
                    random.add(number)
    reached = trace.ancestors()
    return [mask for mask in masks if mask.number in reached]


def _is_mask(value: Array) -> bool:
    return value.dtype == bool or (value.dtype.kind == "f" and bool(np.isin(value, (0.0, 1.0)).all()))


def _settled(trace: Trace, masks: Sequence[_Mask]) -> Trace:
    """A copy of a trace in which the masks are given, not computed."""
    numbers = {mask.number for mask in masks}
    settled = copy(trace)
    settled.values = trace.values.with_changes({})
    settled.operations = [o for o in trace.operations if numbers.isdisjoint(o.outputs)]
    settled.settled = trace.settled | numbers
    settled.check_deterministic(_REMEDY)
    return settled


def _pairs(reference: Sequence[_Mask], candidate: Sequence[_Mask]) -> Iterator[tuple[_Mask, _Mask]]:
    """Masks of one size, in the order of execution."""
    sizes = [[mask.value.size for mask in masks] for masks in (reference, candidate)]
    for a, b, count in SequenceMatcher(None, *sizes, autojunk=False).get_matching_blocks():
        yield from zip(reference[a : a + count], candidate[b : b + count], strict=True)


def _unpaired(
    reference: Sequence[_Mask], candidate: Sequence[_Mask], pairs: Sequence[tuple[_Mask, _Mask]]
) -> Iterator[Defect]:
    """Masks that one side alone draws; one after the other they are masks of other shapes."""
    paired = {id(mask) for pair in pairs for mask in pair}
    unpaired = [[mask for mask in masks if id(mask) not in paired] for masks in (reference, candidate)]
    for one, other in zip(*unpaired, strict=False):
        note = f"{other.place}: dropout with a mask of shape {other.value.shape}; that of {one.place} has "
        yield Defect((one.operation,), (other.operation,), 1.0, note=f"{note}{one.value.shape}")
    common = min(map(len, unpaired))
    for mask in unpaired[0][common:]:
        yield Defect((mask.operation,), (), 1.0, note=f"{mask.place}: dropout that the candidate does not have")
    for mask in unpaired[1][common:]:
        yield Defect((), (mask.operation,), 1.0, note=f"{mask.place}: dropout that the reference does not have")


def _other_rates(pairs: Sequence[tuple[_Mask, _Mask]]) -> Iterator[Defect]:
    """Pairs of places whose masks together drop more, or less, than chance explains."""
    groups: dict[tuple[str, str], list[tuple[_Mask, _Mask]]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].place, pair[1].place), []).append(pair)
    for places, group in groups.items():
        sizes = [one.value.size for one, _ in group]
        shares = [[one.share for one, _ in group], [abs(_is_inverted(*pair) - pair[1].share) for pair in group]]
        rates = [float(np.average(share, weights=sizes)) for share in shares]
        rates = rates if sum(rates) < 1 else [1 - rate for rate in rates]  # fewer are dropped than kept
        middle = sum(rates) / 2
        deviation = (2 * middle * (1 - middle) / sum(sizes)) ** 0.5
        if abs(rates[0] - rates[1]) > _DEVIATIONS * deviation:
            note = f"{places[1]}: dropout rate of about {rates[1]:.2g}; that of {places[0]} is about {rates[0]:.2g}"
            yield Defect((group[0][0].operation,), (group[0][1].operation,), abs(rates[0] - rates[1]), note=note)


def _is_inverted(one: _Mask, other: _Mask) -> bool:
    """Whether the ones of one mask are where the other's zeros are, judged by their shares."""
    return abs(one.share - other.share) > abs(one.share - (1 - other.share))


def _arranged(reference: Trace, candidate: Trace, one: _Mask, other: _Mask) -> Array:
    """The reference's mask, arranged like the candidate's values that it is applied to."""
    value = one.value.astype(bool) ^ _is_inverted(one, other)
    source, target = _applied_to(reference, one), _applied_to(candidate, other)
    if source is not None and target is not None and not same_order(source, target, EXACT):
        layout = find_arrangement(source, target, EXACT)
        value = value if layout is None else layout.apply(value)
    return value.reshape(other.value.shape).astype(other.value.dtype)


def _applied_to(trace: Trace, mask: _Mask) -> Array | None:
    """The value of the mask's size that the mask is first combined with."""
    reached = {mask.number}
    for operation in trace.operations:
        if not reached.isdisjoint(operation.inputs):
            for number in operation.inputs:
                value = trace.values[number]
                alike = value.dtype.kind == "f" and value.size == mask.value.size > 1
                if number not in reached and alike and not (value == value.flat[0]).all():
                    return value
            reached.update(operation.outputs)
    return None
