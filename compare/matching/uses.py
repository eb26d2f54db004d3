"""Gives each use of a value a number of its own, so that a step may be missing before one use and not before others.

A norm that a port leaves out before its attention is missing there, and not on the way of the residual.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from ..capture.trace import Operation, Trace

USE = "use"  # as a use of a value is named, which computes nothing


def with_uses(trace: Trace) -> Trace:
    """The trace with a copy of each input and computed value for each line that uses it, if several do.

    Numbers stay the same.
    """
    made = {*trace.inputs.values(), *(number for operation in trace.operations for number in operation.outputs)}
    users: dict[int, list[int]] = {}
    for i, operation in enumerate(trace.operations):
        for number in dict.fromkeys(operation.inputs):
            if number in made and trace.values.kind(number) == "f" and trace.values.kept(number).size > 1:
                users.setdefault(number, []).append(i)
    result = copy(trace)
    result.values = trace.values.with_changes({})
    inputs = {i: dict[int, int]() for i in range(len(trace.operations))}
    copies: dict[int, list[Operation]] = {}
    for number, places in users.items():
        groups = _groups([trace.operations[i].lines for i in places]) if len(places) > 1 else []
        for lines, members in groups if len(groups) > 1 else ():
            own = result.add(trace.values.kept(number))
            first = places[members[0]]
            module = trace.operations[first].module
            copies.setdefault(first, []).append(Operation(USE, (number,), (own,), module, lines, {}, _copy))
            for member in members:
                inputs[places[member]][number] = own
    result.operations = []
    for i, operation in enumerate(trace.operations):
        result.operations += copies.get(i, ())
        renamed = tuple(inputs[i].get(number, number) for number in operation.inputs)
        result.operations.append(operation if renamed == operation.inputs else replace(operation, inputs=renamed))
    return result


def _groups(stacks: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Indices of stacks of lines by what is left of each within the innermost line that all have, and that line.

    Queries, keys and values that one attention computes from a value are one use of it. So are all that are computed
    within a line that uses the value itself too, as in x + attention(x).
    """
    shared = [line for line in stacks[0] if all(line in stack for stack in stacks)]
    places = [stack.index(shared[0]) if shared else len(stack) for stack in stacks]
    groups: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for i, (stack, place) in enumerate(zip(stacks, places, strict=True)):
        inner = place if 0 in places else max(place - 1, 0)
        groups.setdefault((place > 0, stack[inner:]), []).append(i)
    return [(lines, members) for (_, lines), members in groups.items()]


def _copy(arrays: Sequence[np.ndarray], settings: Mapping[str, Any]) -> list[np.ndarray]:
    return [arrays[0]]
