"""Changes to a candidate as functions of both sides' values, so that each can be repeated for other inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from ..capture.trace import Operation
from ..matching.matching import Values, alignments, orders_of_axes
from ..matching.regions import Scalar
from .alternatives import Alternative, alternatives, arrangements, insertions

Array = np.ndarray
_BLOCKS = 4  # most blocks of a packed parameter
FLOAT32 = 2e-7  # relative; float32 rounds by at most half of it
_MASKED = -1e4  # a score from which on an element is masked
_ANY = 10  # rank below which an alternative is looked up
Sides = tuple[Values, Values]  # values of the reference and of the candidate
Edit = Callable[[Sides], Mapping[int, Array]]  # the candidate's values that a repair changes, from those before
Operand = tuple[int, int] | Array  # (which side, the number of its value), or a number
Edits = tuple[tuple[int, Edit], ...]  # (the last value that it changes, edit) in the order of execution


@dataclass(frozen=True)
class Repair:
    """A change that makes the candidate's value equal to the reference's where it was tried."""

    number: int  # the value that changes
    text: str
    operation: Operation | None = None  # whose output changes, or which uses the parameter or constant that does
    parameter: str = ""
    rounding: bool = False  # it undoes the rounding of a constant to float32, and nothing else
    literal: bool = False  # it changes a number in the code
    edits: Edits = field(default=(), compare=False, repr=False)  # the change as a function, for other inputs

    def __str__(self) -> str:
        """What to change."""
        return f"{self.parameter} {self.text}" if self.parameter else self.text


def edited(sides: Sides, edits: Edits, operations: Sequence[Operation] | None = None) -> Values:
    """The candidate's values after edits, and all that follows from them, or what these operations compute."""
    reference, candidate = sides
    for _, edit in edits:
        changes = edit((reference, candidate))
        candidate = candidate.changed(candidate.replay(changes, operations), changes)
    return candidate


def literals(numbers: Sequence[tuple[Scalar, float]]) -> Edits:
    """Several numbers in the code."""
    return tuple((scalar.number, partial(literal, scalar, value)) for scalar, value in numbers)


def computed_otherwise(operation: Operation, text: str, sides: Sides) -> dict[int, Array]:
    """The operation's output as this alternative computes it."""
    (number,) = operation.outputs
    inputs = [sides[1].value(n) for n in operation.inputs]
    old = sides[1].value(number)
    return {number: next((a.value for a in alternatives(operation, inputs, old, _ANY) if a.text == text), old)}


def from_reference(origin: int, number: int, place: int, shift: float, added: bool, sides: Sides) -> dict[int, Array]:
    """One of the reference's parameters in the place of a value, moved by a number, or added to it."""
    value = sides[1].value(number)
    arranged = next(islice(arranged_as(sides[0].value(origin), value), place, None), value)
    return {number: value + arranged if added else arranged + shift}


def arrangement(number: int, text: str, sides: Sides) -> dict[int, Array]:
    """A value in another order."""
    value = sides[1].value(number)
    return {number: next((other for other, name in arrangements(value) if name == text), value)}


def exchange(one: int, other: int, sides: Sides) -> dict[int, Array]:
    """Two values, each in the other's place."""
    return {one: sides[1].value(other), other: sides[1].value(one)}


def transpose(numbers: Sequence[int], sides: Sides) -> dict[int, Array]:
    """Matrices, transposed."""
    return {number: sides[1].value(number).T for number in numbers}


def literal(scalar: Scalar, value: float, sides: Sides) -> dict[int, Array]:
    """Another number in the code."""
    return {scalar.number: scalar.change(sides[1], value)}


def with_computed_number(scalar: Scalar, number: int, sides: Sides) -> dict[int, Array]:
    """A number in the code that the reference computes."""
    return {scalar.number: scalar.change(sides[1], float(sides[0].value(number).reshape(())))}


def scaled(number: int, values: Values, factor: float) -> Array:
    """A value times a factor."""
    return values.value(number) * factor


def function_of(number: int, end: int, function: Callable[[Array], Array], sides: Sides) -> dict[int, Array]:
    """The end as a function of another value."""
    return {end: function(sides[1].value(number))}


def arranged_as(source: Array, value: Array) -> Iterator[Array]:
    """A parameter, or one of its equal blocks, in the shape of another, in each order of its axes."""
    count, rest = divmod(source.size, max(value.size, 1))
    if rest or not 0 < count <= _BLOCKS:
        return
    axes = [axis for axis, size in enumerate(source.shape) if size % count == 0] if count > 1 else [0]
    for axis in axes:
        for block in np.split(source, count, axis) if count > 1 else [source]:
            closest = alignments(block, value)
            yield from closest
            if any(np.array_equal(array, value) for array in closest):  # it may have been reshaped, not transposed
                yield from orders_of_axes(block, value.shape)
            if block.ndim == 2:
                yield block.T.reshape(value.shape)


def fits_mask(value: Array, size: int) -> bool:
    """Whether a value of the reference can be a mask of this size: booleans, or a few huge negative numbers."""
    if value.size != size or value.dtype == bool:
        return value.size == size > 1
    masked = value <= _MASKED if value.dtype.kind == "f" else np.zeros(1, bool)
    return bool(masked.any() and not masked.all())


def mask_of(value: Array, like: Array, inverted: bool) -> Array:
    """The mask in the shape of another: True where the reference has True, or a number that is not huge."""
    mask = value if value.dtype == bool else ~(value <= _MASKED)
    return mask.reshape(like.shape) ^ inverted


def masked(operation: Operation, mask: int, source: int, inverted: bool, sides: Sides) -> dict[int, Array]:
    """A selection with the reference's mask."""
    inputs, (number,) = [sides[1].value(n) for n in operation.inputs], operation.outputs
    shape = np.broadcast_shapes(*(array.shape for array in inputs))
    own = np.broadcast_to(sides[1].value(mask), shape)
    other = mask_of(sides[0].value(source), own, inverted)
    assert operation.compute is not None
    arrays = [other if n == mask else array for n, array in zip(operation.inputs, inputs, strict=True)]
    return {number: np.asarray(operation.compute(arrays, operation.settings)[0])}


def averaged(number: int, pool: Operation, padded: bool, sides: Sides) -> dict[int, Array]:
    """The sums of a pooling divided by the size of its window, or by the part of it that is no padding."""
    assert pool.compute is not None
    ones = np.ones_like(sides[1].value(pool.inputs[0]))
    counts = np.prod(pool.settings["window_dimensions"]) if padded else pool.compute([ones], pool.settings)[0]
    return {number: np.asarray(sides[1].value(pool.outputs[0]) / counts)}


def inserted(sides: Sides, number: int, operands: Sequence[tuple[Operand, str]]) -> Iterator[Alternative]:
    """The steps that may be missing after a value."""
    arrays = ((sides[o[0]].value(o[1]) if isinstance(o, tuple) else o, text) for o, text in operands)
    return insertions(sides[1].value(number), arrays)


def insertion(number: int, operands: Sequence[tuple[Operand, str]], place: int, sides: Sides) -> dict[int, Array]:
    """A value after one of the steps that may be missing."""
    step = next(islice(inserted(sides, number, operands), place, None), None)
    return {number: sides[1].value(number) if step is None else step.value}
