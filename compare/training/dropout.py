"""Puts a reference's dropout masks and random numbers into a candidate, to compare both in training mode."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import permutations
from typing import Any

import numpy as np

from ..capture.models import capture
from ..capture.trace import CaptureError, Operation, Trace
from ..matching.matching import EXACT, find_arrangement, same_order
from ..repair.defect import Defect
from .draws import Draw, kind_of, other_draws

Array = np.ndarray
_DEVIATIONS = 5  # standard deviations by which the shares of two masks differ if their rates do
_FILLED = ("aten.empty", "aten.zeros", "aten.ones", "aten.full", "aten.new_")
_REMEDY = "only dropout masks, and normal, uniform, exponential and whole random numbers are compared"


def capture_in_training(
    models: tuple[Any, Any],
    inputs: tuple[Sequence[Any], Sequence[Any]],
    cotangents: tuple[Mapping[str, Array] | None, Mapping[str, Array] | None] = (None, None),
) -> tuple[Trace, Trace, tuple[Defect, ...]]:
    """Traces of two models in training mode with the same random numbers, and where what they draw differs.

    Raises:
        CaptureError: a model cannot be traced, or draws random numbers of another kind.
    """
    reference, candidate = (
        capture(model, given, factors, random=True)
        for model, given, factors in zip(models, inputs, cotangents, strict=True)
    )
    traces = reference, candidate
    masks = [_masks(trace) for trace in traces]
    traces = [_settled(trace, own) for trace, own in zip(traces, masks, strict=True)]
    others = [list(other_draws(trace)) for trace in traces]
    reference, candidate = (_settled(trace, own) for trace, own in zip(traces, others, strict=True))
    draws = [one + other for one, other in zip(masks, others, strict=True)]
    if not any(draws) and not any(trace.outputs.keys() & trace.buffers for trace in traces):
        raise CaptureError("neither model applies dropout; return both in training mode to compare their dropout")
    pairs = list(_pairs(draws[0], draws[1]))
    for trace in (reference, candidate):
        trace.check_deterministic(_REMEDY)
    for one, other in pairs:
        value = other.drawn(_arranged(reference, candidate, one, other))
        for number, new in candidate.replay({other.number: value}).items():
            candidate.values[number] = new
    return reference, candidate, (*_unpaired(draws[0], draws[1], pairs), *_other_rates(pairs), *_other_bounds(pairs))


def _masks(trace: Trace) -> list[Draw]:
    """The masks on which outputs depend, in the order of execution."""
    random: set[int] = set()
    masks = []
    for operation in trace.operations:
        is_filled = any(word in operation.name for word in _FILLED)  # with constants, in the shape of its input
        if kind_of(operation) == "integer" or is_filled:
            continue
        if operation.name in trace.random or not random.isdisjoint(operation.inputs):
            for number in operation.outputs:
                if _is_mask(trace.values[number]):
                    masks.append(Draw(number, operation, trace.values[number]))
                else:
                    random.add(number)
    reached = trace.ancestors()
    return [mask for mask in masks if mask.number in reached]


def _is_mask(value: Array) -> bool:
    return value.dtype == bool or (value.dtype.kind == "f" and bool(np.isin(value, (0.0, 1.0)).all()))


def _settled(trace: Trace, draws: Sequence[Draw]) -> Trace:
    """A copy of a trace in which what was drawn is given, not computed."""
    numbers = {draw.number for draw in draws}
    settled = copy(trace)
    settled.values = trace.values.with_changes({})
    settled.operations = [o for o in trace.operations if numbers.isdisjoint(o.outputs)]
    settled.settled = trace.settled | numbers
    return settled


def _pairs(reference: Sequence[Draw], candidate: Sequence[Draw]) -> Iterator[tuple[Draw, Draw]]:
    """Draws of one kind and one size, in the order of execution."""
    for kind in dict.fromkeys(draw.kind for draw in reference):
        sides = [[draw for draw in draws if draw.kind == kind] for draws in (reference, candidate)]
        sizes = [[draw.value.size for draw in draws] for draws in sides]
        for a, b, count in SequenceMatcher(None, *sizes, autojunk=False).get_matching_blocks():
            yield from zip(sides[0][a : a + count], sides[1][b : b + count], strict=True)


def _unpaired(
    reference: Sequence[Draw], candidate: Sequence[Draw], pairs: Sequence[tuple[Draw, Draw]]
) -> Iterator[Defect]:
    """What one side alone draws; of one kind, one after the other are draws of other shapes."""
    paired = {id(draw) for pair in pairs for draw in pair}
    for kind in dict.fromkeys(draw.kind for draw in (*reference, *candidate)):
        name = "dropout" if kind == "mask" else f"{kind} random numbers"
        unpaired = [[d for d in draws if id(d) not in paired and d.kind == kind] for draws in (reference, candidate)]
        for one, other in zip(*unpaired, strict=False):
            what = "with a mask of shape" if kind == "mask" else "of shape"
            note = f"{other.place}: {name} {what} {other.value.shape}; that of {one.place} has {one.value.shape}"
            yield Defect((one.operation,), (other.operation,), 1.0, note=note)
        common = min(map(len, unpaired))
        for draw in unpaired[0][common:]:
            yield Defect((draw.operation,), (), 1.0, note=f"{draw.place}: {name} that the candidate does not have")
        for draw in unpaired[1][common:]:
            yield Defect((), (draw.operation,), 1.0, note=f"{draw.place}: {name} that the reference does not have")


def _other_bounds(pairs: Sequence[tuple[Draw, Draw]]) -> Iterator[Defect]:
    """Pairs of whole random numbers from other ranges."""
    for one, other in pairs:
        if one.kind == "integer" and one.bounds != other.bounds:
            ranges = [f"from {draw.bounds[0]:.0f} to {draw.bounds[1] - 1:.0f}" for draw in (one, other)]
            note = f"{other.place}: random numbers {ranges[1]}; those of {one.place} are {ranges[0]}"
            yield Defect((one.operation,), (other.operation,), 1.0, note=note)


def _other_rates(pairs: Sequence[tuple[Draw, Draw]]) -> Iterator[Defect]:
    """Pairs of places whose masks together drop more, or less, than chance explains."""
    groups: dict[tuple[str, str], list[tuple[Draw, Draw]]] = {}
    for pair in (pair for pair in pairs if pair[0].kind == "mask"):
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


def _is_inverted(one: Draw, other: Draw) -> bool:
    """Whether the ones of one mask are where the other's zeros are, judged by their shares."""
    return abs(one.share - other.share) > abs(one.share - (1 - other.share))


def _arranged(reference: Trace, candidate: Trace, one: Draw, other: Draw) -> Array:
    """What the reference draws, arranged like the candidate's values that it is applied to."""
    value = one.value.astype(bool) ^ _is_inverted(one, other) if one.kind == "mask" else one.value
    source, target = _applied_to(reference, one), _applied_to(candidate, other)
    if source is None or target is None:
        orders = (value.transpose(order) for order in permutations(range(value.ndim)))  # the plainest first
        return next((a for a in orders if a.shape == other.value.shape), value).reshape(other.value.shape)
    moved = np.empty_like(value.ravel())
    moved[source.places] = value.ravel()
    layout = None
    if not same_order(source.value, target.value, EXACT):
        layout = find_arrangement(source.value, target.value, EXACT)
    moved = moved if layout is None else layout.apply(moved.reshape(source.value.shape)).ravel()
    return moved[target.places].reshape(other.value.shape)


@dataclass(frozen=True)
class _Application:
    """The value of a draw's size that it is first combined with, and where in it each number drawn is used."""

    value: Array
    places: Array


def _applied_to(trace: Trace, draw: Draw) -> _Application | None:
    """The first value of its size that a draw is combined with."""
    reached = {draw.number}
    before: list[Operation] = []
    for operation in trace.operations:
        if not reached.isdisjoint(operation.inputs):
            for number in operation.inputs:
                value = trace.values[number]
                alike = value.dtype.kind == "f" and value.size == draw.value.size > 1
                if number not in reached and alike and not (value == value.flat[0]).all():
                    return _Application(value, _places(trace, draw, before, operation))
            reached.update(operation.outputs)
            before.append(operation)
    return None


def _places(trace: Trace, draw: Draw, before: Sequence[Operation], operation: Operation) -> Array:
    """Where each number of a draw is once it is combined with another value, such as after a transpose."""
    plain = np.arange(draw.value.size)
    if draw.kind == "mask":
        return plain
    counted = trace.replay({draw.number: plain.reshape(draw.value.shape).astype(draw.value.dtype)}, before)
    numbers = [number for number in operation.inputs if number in counted]
    if len(numbers) != 1 or counted[numbers[0]].size != plain.size:
        return plain
    used, order = trace.values[numbers[0]].ravel(), np.argsort(draw.value, axis=None)
    for sign in (1, -1):  # what comes between grows with the draw, as a logarithm does, or falls
        places = np.argsort(sign * counted[numbers[0]], axis=None)
        if (np.diff(sign * used[places][order]) > 0).all():
            return places
    return plain
