"""Mistakes in what depends on positions alone, such as masks and rotary tables, which the reference computes otherwise.

None of these values need be one of the reference's, so that a change is judged by what matches after it.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.matching import difference, producers, signature
from ..matching.regions import SELECTIONS
from .alternatives import COMPARING, alternatives, kind
from .defect import Defect
from .edits import Edits, Repair, computed_otherwise
from .state import State, Step

Array = np.ndarray
_WINDOW = 60  # operations after a change in which values match if it is right
_ENOUGH = 8  # values that match after it, from which on it is no coincidence
_MOST = 400  # changes that are tried
_MOVING = ("concatenate", "pad", "slice", "dynamic_slice", "gather")
_RANK = 3  # below which alternatives are tried


def in_tables(state: State) -> tuple[int, Defect, State] | None:
    """(value of the reference, difference, state after it) for the change after which most values match; else None."""
    before = state.matches.of_reference.keys()
    best: tuple[tuple[bool, int, int], list[Operation], str, Mapping[int, Array]] | None = None
    for count, (operations, text, values) in enumerate(_attempts(state)):
        if count == _MOST or state.candidate.deadline.is_over:
            break
        if not _leads_to_more(state, values):
            continue
        changes = state.candidate.replay(values)
        matches = state.matches.updated(state.candidate.changed(changes, values), changes)
        closes, gain = state.closed_by(changes), len(matches.of_reference.keys() - before)
        rank = closes, _plainness(operations[0], text), gain
        if (closes or gain >= _ENOUGH) and (best is None or rank > best[0]):
            best = rank, operations, text, values
    return None if best is None else _finished(state, *best)


def _finished(
    state: State, rank: tuple[bool, int, int], operations: list[Operation], text: str, values: Mapping[int, Array]
) -> tuple[int, Defect, State]:
    changes = state.candidate.replay(values)
    matches = state.matches.updated(state.candidate.changed(changes, values), changes)
    new = [n for n in changes if n in matches.of_candidate and n not in state.matches.of_candidate]
    other = next((n for n in new if n not in values), state.differing[0][1])
    number = next(iter(matches.of_candidate.get(other, ())), state.differing[0][0])
    made = producers(state.reference.trace).get(number)
    target = state.candidate.value(other)
    largest = float(np.abs(changes[other]).max(initial=0)) or 1.0
    error = float(difference(changes[other], target).max(initial=0)) / largest
    edits: Edits = tuple((o.outputs[0], partial(computed_otherwise, o, text)) for o in operations)
    selection = _selection(state, changes)
    named = text if selection is None else f"{kind(selection)}: inputs 2 and 3 swapped"
    repair = Repair(operations[0].outputs[0], named, selection or operations[0], edits=edits)
    step = Step(number, other, changes[other], rank[2], rank[0])
    defect = Defect(() if made is None else (made,), (operations[0],), error, repair)
    return number, defect, state.forced(values, step, repair)


def _selection(state: State, changes: Mapping[int, Array]) -> Operation | None:
    """The only line that selects numbers of the model by the opposite mask after a change: rather its cases are."""
    of_positions = {id(operation) for operation in _of_positions(state.candidate.trace)}
    found: list[Operation] = []
    for operation in state.candidate.trace.operations:
        if operation.name in SELECTIONS and id(operation) not in of_positions:
            masks = [n for n in operation.inputs if n in changes and changes[n].dtype == bool]
            if any(np.array_equal(changes[n], ~state.candidate.value(n)) for n in masks):
                found.append(operation)
    return found[0] if found and all(operation.line == found[0].line for operation in found) else None


def _plainness(operation: Operation, text: str) -> int:
    """How likely a change is where several lead to the same: operands exchanged, or what is moved already moved."""
    if " moved by " in text or " shifted by " in text:
        return 2 * (kind(operation) in _MOVING) - 1
    return 1 if text.endswith((" swapped", ": negated")) or kind(operation) in COMPARING else 0


def _leads_to_more(state: State, values: Mapping[int, Array]) -> bool:
    """Whether one of the next values is as large as one of the reference's that none of the candidate's is equal to."""
    for number, value in state.candidate.replay(values, limit=_WINDOW).items():
        one = signature(value) if number not in values else None
        alike = state.reference.alike(one, state.bound) if one is not None else ()
        if any(n not in state.matches.of_reference for n in alike):
            return True
    return False


def _attempts(state: State) -> Iterator[tuple[list[Operation], str, Mapping[int, Array]]]:
    """(operations of one line, what they compute otherwise, their values) that no number of the model enters."""
    groups: dict[tuple[str, tuple[str, ...]], list[Operation]] = {}
    for operation in _of_positions(state.candidate.trace):
        groups.setdefault((operation.name, operation.lines[:1]), []).append(operation)
    sides = state.reference.plain(), state.candidate.plain()
    whole = [group for group in groups.values() if len(group) > 1]
    for operations in (*whole, *([operation] for group in groups.values() for operation in group)):
        first = operations[0]
        inputs, old = [state.candidate.value(n) for n in first.inputs], state.candidate.value(first.outputs[0])
        texts = [a.text for a in alternatives(first, inputs, old, _RANK) if f"{kind(first)}: input " not in a.text]
        for text in dict.fromkeys(texts):
            values = {}
            for operation in operations:
                values |= computed_otherwise(operation, text, sides)
            if any(not np.array_equal(v, state.candidate.value(n), equal_nan=True) for n, v in values.items()):
                yield operations, text, values


def _of_positions(trace: Trace) -> list[Operation]:
    """The operations that only constants and inputs of whole numbers enter, and that lead to an output."""
    numbers = {n for n in (*trace.inputs.values(), *trace.parameters.values()) if trace.values.kind(n) == "f"}
    live, found = trace.ancestors(), []
    for operation in trace.operations:
        if not numbers.isdisjoint(operation.inputs):
            numbers.update(operation.outputs)
        elif operation.compute is not None and len(operation.outputs) == 1 and operation.outputs[0] in live:
            found.append(operation)
    return found
