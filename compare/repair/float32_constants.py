"""Which constant of a model's code was rounded to float32, where two models differ by no more than that."""

from collections.abc import Container, Iterator, Sequence

import numpy as np

from ..matching.matching import EXACT, Matches, Side, Values, alignments, difference, same_order
from ..matching.regions import Region, constants, scalars
from .edits import Repair
from .repairs import RepairSearch

Array = np.ndarray
_HALF = 2.0**-24  # relative; of a unit in the last place
_SLACK = 4.0  # roundings of a table's numbers may add up better than the ones tried
_SLACK_OF_ONE = 2.2  # a number that was computed in float32 is off by a unit in the last place
_SHARE = 0.1  # of all effects, from which on a constant is named
_BITS = 12  # significant bits, from which on a number is no short one such as 0.5 or 768


def unrounded_constant(sides: tuple[Side, Side], regions: tuple[Region, Region], bound: float) -> Repair | None:
    """The constant of the reference whose float32 number, in full precision, makes the regions' ends equal."""
    one, other = regions
    for target in alignments(sides[1].value(other.end), sides[0].value(one.end)):
        repair = RepairSearch((sides[1], sides[0]), (other, one), target, bound).rounding()
        if repair is not None:
            return repair
    return None


def rounded_constant(sides: tuple[Side, Side], regions: tuple[Region, Region], matches: Matches) -> Repair | None:
    """The constant that explains a small difference of the regions' ends; None if no code there has one.

    A constant of the reference is tried; others have the numbers of float32, and rounding them has that effect.
    """
    one, other = regions
    repair = unrounded_constant(sides, regions, matches.bound)
    if repair is not None:
        return repair
    end, value = sides[1].value(other.end), sides[0].value(one.end)
    error = min((_largest_difference(a, end) for a in alignments(value, end)), default=np.inf)
    common = matches.of_candidate, matches.of_reference
    for side, region, matched in zip(sides[::-1], regions[::-1], common, strict=True):
        for moved, slack, repair in _moved(side, region, matched):
            before = side.value(region.end)
            after = side.plain().replay({repair.number: moved}, region.operations).get(region.end, before)
            if error <= slack * _largest_difference(before, after):
                return repair
    return None


def _is_float32(value: Array) -> bool:
    """Whether the numbers are float32's, and some have more significant bits than short decimals happen to have."""
    if value.dtype.kind != "f" or not np.array_equal(value, value.astype(np.float32), equal_nan=True):
        return False
    if np.array_equal(value, np.round(value)):  # whole numbers are exact in both
        return False
    mantissas = np.ldexp(np.frexp(value[np.isfinite(value)])[0], _BITS)
    return bool((mantissas != np.trunc(mantissas)).any())


def explain(sides: tuple[Values, Values], matches: Matches, pairs: Sequence[tuple[int, int]]) -> list[Repair]:
    """The constants whose rounding to float32 changes outputs by as much as they differ; empty if it does not.

    Each constant that has the numbers of float32 is moved by half a unit in the last place, and its effect computed.
    """
    effects: list[tuple[Array, Repair]] = []
    for i, (side, matched) in enumerate(zip(sides, (matches.of_reference, matches.of_candidate), strict=True)):
        ends = [pair[i] for pair in pairs]
        live = side.trace.ancestors(ends)
        operations = tuple(o for o in side.trace.operations if not live.isdisjoint(o.outputs))
        for moved, slack, repair in _moved(side, Region(operations, -1), matched):
            values = side.replay({repair.number: moved})
            effect = [_largest_difference(side.value(n), values.get(n, side.value(n))) for n in ends]
            effects.append((slack * np.array(effect), repair))
    total = sum((effect for effect, _ in effects), np.zeros(len(pairs)))
    for (one, other), explained in zip(pairs, total, strict=True):
        value, target = sides[0].value(one), sides[1].value(other)
        error = min((_largest_difference(a, target) for a in alignments(value, target)), default=np.inf)
        if error > explained and not same_order(value, target, EXACT):
            return []
    return [repair for effect, repair in effects if (effect > _SHARE * total).any()]


def _moved(side: Values, region: Region, matched: Container[int]) -> Iterator[tuple[Array, float, Repair]]:
    """(the value after a constant with float32's numbers moved by half a unit, factor of its effect, the constant)."""
    names = {number: name for name, number in side.trace.parameters.items()}
    for scalar in scalars(side, region):
        if _is_float32(np.asarray(scalar.value)):
            text = f"{scalar.value:.9g} is rounded to float32"
            repair = Repair(scalar.number, text, scalar.operation, rounding=True)
            yield scalar.change(side, scalar.value * (1 + _HALF)), _SLACK_OF_ONE, repair
    for number in constants(side, region):
        value = side.value(number)
        if number not in matched and value.size > 1 and _is_float32(value):
            user = next((o for o in region.operations if number in o.inputs), None)
            signs = np.random.default_rng(0).choice((-1, 1), value.shape)
            name = names.get(number, "a constant")
            repair = Repair(number, "is rounded to float32", user, name, rounding=True)
            yield value * (1 + _HALF * signs), _SLACK, repair


def _largest_difference(one: Array, other: Array) -> float:
    return float(difference(one, other).max(initial=0))
