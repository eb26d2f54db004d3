"""The operations between the last values that two traces have in common and the first that differs."""

from collections.abc import Sequence

from .capture.trace import Operation, Trace
from .matching import Matches, Side, producers, same_order
from .repairs import Region

_REARRANGING = (
    *("reshape", "transpose", "squeeze", "expand_dims", "copy", "rev", "aten.view", "aten.transpose", "aten.permute"),
    *("aten.t", "aten.clone", "aten._unsafe_view", "aten.expand", "aten.squeeze", "aten.unsqueeze", "aten.flip"),
)


def regions(
    sides: tuple[Side, Side], matches: Matches, suspects: Sequence[Sequence[int]], ends: tuple[int, int]
) -> tuple[Region, Region]:
    """The regions of the reference and of the candidate that lead to these ends from values that match."""
    reference = _region(sides[0].trace, set(suspects[0]), ends[0])
    suspect = {*suspects[1], *matches.rearranged}
    suspect |= _other_order(sides, matches, reference, suspect, ends[1])
    return Region(reference, ends[0]), Region(_region(sides[1].trace, suspect, ends[1]), ends[1])


def _other_order(
    sides: tuple[Side, Side], matches: Matches, reference: Sequence[Operation], suspect: set[int], end: int
) -> set[int]:
    """Values that enter the candidate's region in another flat order than the reference's; parameters apart."""
    trace = sides[1].trace
    made = producers(trace)
    entering = {n for operation in reference for n in operation.inputs}
    rearranged: set[int] = set()
    for operation in _region(trace, suspect, end):
        for number in operation.inputs:
            sources = entering.intersection(matches.of_candidate.get(number, ()))
            value = sides[1].value(number)
            if sources and not any(same_order(sides[0].value(n), value, matches.bound) for n in sources):
                while number in made and made[number].name in _REARRANGING:
                    rearranged.add(number)
                    number = made[number].inputs[0]
    return rearranged


def _region(trace: Trace, suspect: set[int], end: int) -> tuple[Operation, ...]:
    """The operations that lead to a value from values that both sides have."""
    made, open_values, region = producers(trace), [end], []
    seen: set[int] = set()
    while open_values:
        number = open_values.pop()
        if number in seen or number not in made:
            continue
        seen.add(number)
        region.append(made[number])
        open_values += [n for n in made[number].inputs if n in suspect]
    order = {id(operation): i for i, operation in enumerate(trace.operations)}
    unique = {id(operation): operation for operation in region}
    return tuple(sorted(unique.values(), key=lambda operation: order[id(operation)]))
