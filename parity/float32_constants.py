"""Which constant of a model's code was rounded to float32, where two models differ by no more than that."""

import numpy as np

from .matching import Matches, Side, alignments
from .regions import Region, constants, scalars
from .repairs import Repair, RepairSearch

Array = np.ndarray
_BITS = 12  # significant bits, from which on a number is no short one such as 0.5 or 768


def rounded_constant(sides: tuple[Side, Side], regions: tuple[Region, Region], matches: Matches) -> Repair | None:
    """The constant that explains a small difference of the regions' ends; None if no code there has one.

    A constant of the reference is tried; others are those that have the numbers of float32, and not short ones.
    """
    one, other = regions
    for target in alignments(sides[1].value(other.end), sides[0].value(one.end)):
        success = RepairSearch((sides[1], sides[0]), (other, one), target, matches.bound).best()
        if success is not None and success[1].rounding:
            return success[1]
    common = matches.of_candidate, matches.of_reference
    for side, region, matched in zip(sides[::-1], regions[::-1], common, strict=True):
        for scalar in scalars(side, region):
            if _is_float32(np.asarray(scalar.value)):
                return Repair(scalar.number, f"{scalar.value:.9g} is rounded to float32", scalar.operation, "", True)
        for number in constants(side, region):
            if number not in matched and _is_float32(side.value(number)):
                user = next((o for o in region.operations if number in o.inputs), None)
                return Repair(number, "a constant is rounded to float32", user, rounding=True)
    return None


def _is_float32(value: Array) -> bool:
    """Whether the numbers are float32's, and some have more significant bits than short decimals happen to have."""
    if value.dtype.kind != "f" or not np.array_equal(value, value.astype(np.float32), equal_nan=True):
        return False
    mantissas = np.ldexp(np.frexp(value[np.isfinite(value)])[0], _BITS)
    return bool((mantissas != np.trunc(mantissas)).any())
