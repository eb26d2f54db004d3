"""Parts of one value under each other's names, such as `key, query, value` for `query, key, value`."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations

import numpy as np

from ..capture.trace import Operation
from ..matching.matching import Side
from ..matching.uses import USE
from .edits import Repair, Sides
from .state import State, Step

_SPLITTING = {"split", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"}
_MOST = 4  # parts that are tried in every order
_NEAREST = 3  # values taken apart last before the first that differs
_WINDOW = 60  # operations after the parts
_ENOUGH = 8  # values that match after them, from which on they do so by no coincidence


def unpacked(state: State) -> tuple[Step, Repair, dict[int, np.ndarray]] | None:
    """The order of parts that the reference has too in which most of what follows matches; None if none does."""
    side, found = state.candidate, list(_taken_apart(state))
    parts = side.trace.dependents(n for operation in found for n in operation.outputs)
    before = side.trace.ancestors([n for n in state.suspects[1] if n in parts][:1])
    best: tuple[Step, Repair, dict[int, np.ndarray]] | None = None
    for operation in [o for o in found if not before.isdisjoint(o.outputs)][-_NEAREST:]:
        for order in _orders(side, operation.outputs):
            edit = partial(_in_order, operation.outputs, order)
            changes = edit((state.reference, side))
            step = _step_after(state, changes)
            if step is not None and (best is None or step.gain > best[0].gain):
                names = " and ".join(str(i + 1) for i, other in enumerate(order) if i != other)
                text = f"{operation.name}: outputs {names} in another order"
                repair = Repair(operation.outputs[0], text, operation, edits=((max(operation.outputs), edit),))
                best = step, repair, changes
    return best


def _taken_apart(state: State) -> Iterator[Operation]:
    """The operations that take a value apart that the reference has, into parts that it has too."""
    matched = state.matches.of_candidate
    for operation in state.candidate.trace.operations:
        if operation.name in _SPLITTING and 1 < len(operation.outputs) <= _MOST:
            number = operation.inputs[0]
            while number not in matched and (source := _source(state, number)) is not None:
                number = source
            if number in matched and all(n in matched for n in operation.outputs):
                yield operation


def _source(state: State, number: int) -> int | None:
    """The value of which this one is a use."""
    uses = (o.inputs[0] for o in state.candidate.trace.operations if o.name == USE and number in o.outputs)
    return next(uses, None)


def _orders(side: Side, numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The orders of values of one shape, but for the one that they have."""
    shapes = [side.value(n).shape for n in numbers]
    for order in permutations(range(len(numbers))):
        if order != (*range(len(numbers)),) and [shapes[i] for i in order] == shapes:
            yield order


def _in_order(numbers: Sequence[int], order: Sequence[int], sides: Sides) -> dict[int, np.ndarray]:
    """Values in another order."""
    return {n: sides[1].value(numbers[i]) for n, i in zip(numbers, order, strict=True) if n != numbers[i]}


def _step_after(state: State, changes: dict[int, np.ndarray]) -> Step | None:
    """The step up to the first value that then matches and did not before; None if too few do."""
    values = state.candidate.replay(changes, limit=_WINDOW)
    matches = state.matches.updated(state.candidate.changed(values, changes), values)
    gained = matches.of_reference.keys() - state.matches.of_reference.keys()
    new = [(other, number) for other in values for number in matches.of_candidate.get(other, ()) if number in gained]
    closes = bool(new) and state.closed_by(state.candidate.replay(changes))
    if not new or not (closes or len(gained) >= _ENOUGH):
        return None
    other, number = new[0]
    return Step(number, other, values[other], len(gained), closes)
