"""The operations between the last values that two traces have in common and the first that differs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..capture.trace import Operation, Trace
from .matching import Matches, Side, Values, producers, same_order

Array = np.ndarray
_REARRANGING = (
    *("reshape", "transpose", "squeeze", "expand_dims", "copy", "rev", "aten.view", "aten.transpose", "aten.permute"),
    *("aten.t", "aten.clone", "aten._unsafe_view", "aten.expand", "aten.squeeze", "aten.unsqueeze", "aten.flip"),
)
COPYING = (  # a value's numbers, or some of them
    *(*_REARRANGING, "use", "slice", "dynamic_slice", "split", "gather", "convert_element_type", "aten.slice"),
    "aten._to_copy",
    *("aten.select", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"),
)
SELECTIONS = ("select_n", "aten.where", "aten.masked_fill", "aten.masked_fill_")
# Operations of PyTorch in which a whole number is a number of the code, and no axis or size.
_ARITHMETIC = ("aten.mul", "aten.div", "aten.add", "aten.sub", "aten.rsub", "aten.pow")
_NEAR = 12  # most values by which one is followed back
ARRANGING = ("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "convert_element_type", "aten.t")


@dataclass(frozen=True)
class Region:
    """What leads from values that both sides have to the first that differs."""

    operations: tuple[Operation, ...]  # in the order of execution
    end: int

    @property
    def leaves(self) -> tuple[int, ...]:
        """The values that enter: matched ones, parameters, inputs and constants."""
        made = {number for operation in self.operations for number in operation.outputs}
        numbers = (number for operation in self.operations for number in operation.inputs)
        return tuple(dict.fromkeys(number for number in numbers if number not in made)) or (self.end,)


@dataclass(frozen=True)
class Scalar:
    """A number in the code: a literal or setting of an operation, or a constant of its own."""

    operation: Operation
    value: float
    number: int  # the value that changes with it
    change: Callable[[Values, float], Array]  # the value with another number


def regions(
    sides: tuple[Side, Side], matches: Matches, suspects: Sequence[Sequence[int]], ends: tuple[int, int]
) -> tuple[Region, Region]:
    """The regions of the reference and of the candidate that lead to these ends from values that match."""
    reference = _region(sides[0].trace, set(suspects[0]), ends[0])
    suspect = {*suspects[1]}
    suspect |= _other_order(sides, matches, reference, suspect, ends[1])
    one, other = Region(reference, ends[0]), Region(_region(sides[1].trace, suspect, ends[1]), ends[1])
    suspect |= _other_values(sides, matches, one, other)
    return one, Region(_region(sides[1].trace, suspect, ends[1]), ends[1])


def _other_values(sides: tuple[Side, Side], matches: Matches, reference: Region, candidate: Region) -> set[int]:
    """Values that enter the candidate's region and that the reference has elsewhere, such as a cosine for a sine.

    They are followed back to values that enter the reference's region too, if these are near.
    """
    made = producers(sides[1].trace)
    own, entering = {n for o in reference.operations for n in o.outputs}, set(reference.leaves)
    contents = {sides[0].contents.get(n) for n in (*entering, *own)} - {None}

    def within(number: int, numbers: set[int]) -> bool:
        return not numbers.isdisjoint(matches.of_candidate.get(number, ())) or (
            sides[1].contents.get(number) in contents
        )

    followed: set[int] = set()
    for leaf in candidate.leaves:
        if leaf not in made or within(leaf, entering | own):
            continue
        open_values, path, meets = [leaf], set[int](), False
        while open_values and len(path) < _NEAR:
            number = open_values.pop()
            if within(number, entering):
                meets = True
            elif number in made and number not in path:
                path.add(number)
                open_values += made[number].inputs
        if meets and not open_values:
            followed |= path
    return followed


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


def extended(side: Side, region: Region) -> Region:
    """The region with the operations that lead to its masks, and that arrange its parameters, though they match.

    A mask with True and False swapped is matched, and so is a parameter of the reference in another's place.
    """
    made = producers(side.trace)

    def follows(number: int) -> bool:
        operation = made.get(number)
        return side.value(number).dtype == bool or (operation is not None and operation.name in ARRANGING)

    open_values = [n for n in region.leaves if follows(n)]
    operations = {id(operation): operation for operation in region.operations}
    while open_values:
        operation = made.get(open_values.pop())
        if operation is not None and id(operation) not in operations:
            operations[id(operation)] = operation
            open_values += [n for n in operation.inputs if follows(n)]
    order = {id(operation): i for i, operation in enumerate(side.trace.operations)}
    return Region(tuple(sorted(operations.values(), key=lambda operation: order[id(operation)])), region.end)


def constants(side: Values, region: Region) -> list[int]:
    """Parameters and constants that enter a region, but no inputs."""
    made = {number for operation in side.trace.operations for number in operation.outputs}
    inputs = set(side.trace.inputs.values())
    return [n for n in region.leaves if n not in made and n not in inputs]


def scalars(side: Values, region: Region) -> Sequence[Scalar]:
    """The numbers of a region's code."""
    numbers: list[Scalar] = []
    made = {number for operation in side.trace.operations for number in operation.outputs}
    fixed = {*made, *side.trace.parameters.values(), *side.trace.inputs.values()}
    constants: dict[int, Operation] = {}
    for operation in region.operations:
        for key, value in operation.settings.items():
            is_number = isinstance(value, (float, np.ndarray)) and np.ndim(value) == 0
            is_number = is_number and np.asarray(value).dtype.kind == "f"
            is_number |= type(value) is int and operation.name.rstrip("_") in _ARITHMETIC
            if is_number and len(operation.outputs) >= 1 and operation.compute:
                change = partial(_with_setting, operation, key)
                numbers.append(Scalar(operation, float(value), operation.outputs[0], change))
        for number in operation.inputs:
            if number not in fixed:
                constants.setdefault(number, operation)
    for number, operation in constants.items():
        value = side.value(number)
        if value.size == 1 and value.dtype.kind == "f":
            shape = value.shape
            change = partial(_full, shape)
            numbers.append(Scalar(operation, float(value.reshape(())), number, change))
    return numbers


def _full(shape: tuple[int, ...], side: Values, number: float) -> Array:
    return np.full(shape, number)


def _with_setting(operation: Operation, key: str, side: Values, number: float) -> Array:
    """An operation's first output with another number as a setting."""
    old = operation.settings[key]
    new = np.full_like(old, number) if isinstance(old, np.ndarray) else number
    inputs = [side.value(n) for n in operation.inputs]
    assert operation.compute is not None
    with np.errstate(all="ignore"):
        return np.asarray(operation.compute(inputs, {**operation.settings, key: new})[0])
