"""Puts a defect into a trace: other operations in the place of one, or another parameter, and what follows from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twinax.compare.capture.jax_trace import capture_jax
from twinax.compare.capture.trace import Operation, Trace

Array = np.ndarray
_EFFECT = 1e-7  # outputs that change by less, relative to the largest number, are no defect


@dataclass(frozen=True)
class Planted:
    """A trace with a defect, and where it is."""

    trace: Trace
    line: str = ""  # of the operation, or its module
    parameters: tuple[str, ...] = ()  # that have wrong values


@dataclass(frozen=True)
class Site:
    """A place for a defect; `plant` raises or returns None where it cannot be."""

    operator: str
    detail: str
    plant: Callable[[], Planted | None]


class Draft:
    """A copy of a trace in which operations are replaced."""

    def __init__(self, trace: Trace):
        self.original = trace
        self.trace = copy(trace)
        self.trace.values = trace.values.with_changes({})
        self.trace.operations = list(trace.operations)

    def number(self, value: Array) -> int:
        """The number of a new value."""
        self.trace.values.append(value)
        return len(self.trace.values) - 1

    def replace(self, old: Operation, new: Sequence[Operation]) -> None:
        """Put operations in the place of one; at the end they compute its outputs."""
        index = next(i for i, operation in enumerate(self.trace.operations) if operation is old)
        self.trace.operations[index : index + 1] = new

    def insert(self, old: Operation, function: Callable[..., Any], inputs: Sequence[int], output: int) -> None:
        """Put a JAX function of these values in the place of an operation, with its lines and module."""
        self.replace(old, self.operations(old, function, inputs, output))

    def append(self, old: Operation, function: Callable[..., Any]) -> None:
        """Put a JAX function of an operation's output after it, at its line."""
        (output,) = old.outputs
        inner = self.number(self.trace.values[output])
        self.replace(old, [replace(old, outputs=(inner,)), *self.operations(old, function, [inner], output)])

    def operations(
        self, old: Operation, function: Callable[..., Any], inputs: Sequence[int], output: int
    ) -> list[Operation]:
        """The operations of a JAX function of these values, the last of which has this output."""
        arrays = [self.trace.values[number] for number in inputs]
        part = capture_jax(lambda _, *values: function(*values), {}, arrays)
        numbers = dict(zip((part.inputs[str(i)] for i in range(len(inputs))), inputs, strict=True))
        (last,) = part.outputs.values()
        numbers[last] = output
        for number, value in enumerate(part.values):
            if number not in numbers:
                numbers[number] = self.number(value)
        return [
            replace(
                operation,
                inputs=tuple(numbers[n] for n in operation.inputs),
                outputs=tuple(numbers[n] for n in operation.outputs),
                module=old.module,
                lines=old.lines,
            )
            for operation in part.operations
        ]

    def finished(self, changes: Mapping[int, Array] | None = None) -> Trace | None:
        """The trace, computed anew after these changes; None if its outputs hardly change, or are not finite."""
        trace = self.trace
        for number, value in (changes or {}).items():
            trace.values[number] = value
        old = set(map(id, self.original.operations))
        stale = set(changes or {})
        for operation in trace.operations:
            if id(operation) in old and stale.isdisjoint(operation.inputs):
                continue
            assert operation.compute is not None
            with np.errstate(all="ignore"):
                results = operation.compute([trace.values[n] for n in operation.inputs], operation.settings)
            for number, result in zip(operation.outputs, results, strict=True):
                trace.values[number] = np.asarray(result)
                stale.add(number)
        self._without_unused()
        return trace if self._effect() > _EFFECT else None

    def _without_unused(self) -> None:
        """Leave out what nothing uses any more."""
        trace = self.trace
        dead = self.original.ancestors() - trace.ancestors()
        dead -= {*trace.parameters.values(), *trace.inputs.values()}
        trace.operations = [o for o in trace.operations if not set(o.outputs) <= dead]
        for number in dead:
            trace.values[number] = np.zeros(0)

    def _effect(self) -> float:
        """How much the outputs change; 0 if their shapes change or numbers are not finite any more."""
        largest = 0.0
        for name, number in self.trace.outputs.items():
            old, new = self.original.values[self.original.outputs[name]], self.trace.values[number]
            if old.shape != new.shape or not np.isfinite(new).all():
                return 0.0
            largest = max(largest, float(np.abs(new - old).max(initial=0) / (np.abs(old).max(initial=0) or math.inf)))
        return largest


def planted(trace: Trace, operation: Operation, change: Callable[[Draft], None]) -> Planted | None:
    """A defect at an operation."""
    draft = Draft(trace)
    change(draft)
    result = draft.finished()
    return None if result is None else Planted(result, operation.line or operation.module)


def planted_parameters(trace: Trace, arrays: Mapping[str, Array]) -> Planted | None:
    """Parameters with other values."""
    changes = {trace.parameters[name]: np.asarray(array, np.float64) for name, array in arrays.items()}
    if any(trace.values[number].shape != array.shape for number, array in changes.items()):
        return None
    result = Draft(trace).finished(changes)
    return None if result is None else Planted(result, parameters=tuple(arrays))
