"""Sequences of several lengths that a recurrence reverses with their padding, or goes on with after their end."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ..capture.trace import Operation
from ..matching.matching import Values
from ..matching.regions import Region

Array = np.ndarray
_REVERSALS = ("rev", "aten.flip")
_Sides = tuple[Values, Values]


def within_lengths(side: Values, region: Region) -> Iterator[tuple[str, Operation, tuple[tuple[int, Any], ...]]]:
    """(text, operation, edits): reversals within the lengths that an input gives, then 0 after these lengths too."""
    for name, number in side.trace.given.items():
        lengths = side.value(number)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.size < 2 or lengths.min() < 1:
            continue
        reversals = [o for o in region.operations if o.name in _REVERSALS and _axes(side, o, lengths) is not None]
        if not reversals:
            continue
        text = f"reverses the padding too: reverse each row within its length, input {name}"
        edits = tuple((o.outputs[0], partial(_reversed, o, number)) for o in reversals)
        yield text, reversals[0], edits
        _, along = _axes(side, reversals[0], lengths) or (0, 0)
        time = side.value(reversals[0].inputs[0]).shape[along]
        for operation in region.operations[region.operations.index(reversals[-1]) :]:
            for end in operation.outputs:
                if side.value(end).dtype.kind == "f" and _batch_and_time(side.value(end), lengths.size, time):
                    mask = end, partial(_zero_after, end, number, time)
                    yield f"{text}; {operation.name} should be 0 after it", reversals[0], (*edits, mask)


def _axes(side: Values, operation: Operation, lengths: Array) -> tuple[int, int] | None:
    """(axis of the rows, axis that is reversed); None if the array has no such rows."""
    array, reversed_array = side.value(operation.inputs[0]), side.value(operation.outputs[0])
    for time in range(array.ndim):
        if array.shape[time] >= lengths.max() and np.array_equal(np.flip(array, time), reversed_array, equal_nan=True):
            rows = [axis for axis, size in enumerate(array.shape) if axis != time and size == lengths.size]
            return (rows[0], time) if rows else None
    return None


def _batch_and_time(array: Array, batch: int, time: int) -> tuple[int, int] | None:
    rows = [axis for axis, size in enumerate(array.shape[:2]) if size == batch]
    steps = [axis for axis, size in enumerate(array.shape[:2]) if size == time and axis not in rows[:1]]
    return (rows[0], steps[0]) if rows and steps and array.ndim > 2 else None


def _places(array: Array, lengths: Array, rows: int, time: int) -> tuple[Array, Array]:
    """(step, length of the row) of each element along both axes, for broadcasting."""
    shape = [1] * array.ndim
    shape[time] = array.shape[time]
    steps = np.arange(array.shape[time]).reshape(shape)
    shape[time], shape[rows] = 1, len(lengths)
    return steps, lengths.reshape(shape)


def _reversed(operation: Operation, number: int, sides: _Sides) -> dict[int, Array]:
    array, lengths = sides[1].value(operation.inputs[0]), sides[1].value(number)
    rows, time = _axes(sides[1], operation, lengths) or (0, 1)
    steps, ends = _places(array, lengths, rows, time)
    index = np.where(steps < ends, ends - 1 - steps, steps)
    return {operation.outputs[0]: np.take_along_axis(array, np.broadcast_to(index, array.shape), time)}


def _zero_after(end: int, number: int, time: int, sides: _Sides) -> dict[int, Array]:
    array, lengths = sides[1].value(end), sides[1].value(number)
    rows, along = _batch_and_time(array, lengths.size, time) or (0, 1)
    steps, ends = _places(array, lengths, rows, along)
    return {end: np.where(steps < ends, array, 0.0)}
