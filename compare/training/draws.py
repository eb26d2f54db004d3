"""Random numbers that a model draws besides dropout masks, without their location and scale."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..capture.trace import Operation, Trace

Array = np.ndarray
_KINDS = {
    **dict.fromkeys(("aten.randn", "aten.randn_like", "aten.normal_", "random.normal"), "normal"),
    **dict.fromkeys(("aten.rand", "aten.rand_like", "aten.uniform_", "random.uniform"), "uniform"),
    **dict.fromkeys(("aten.randint", "aten.randint_like", "random.randint"), "integer"),
    **dict.fromkeys(("aten.exponential_", "random.exponential", "random.gumbel"), "exponential"),
}


@dataclass(frozen=True)
class Draw:
    """A dropout mask, or random numbers of another kind as they are at location 0 and scale 1."""

    number: int
    operation: Operation
    value: Array
    kind: str = "mask"
    bounds: tuple[float, float] = (0.0, 1.0)  # location, and location + scale; of integers, the first and the end

    @property
    def place(self) -> str:
        """Its line, or else its module."""
        return self.operation.line or self.operation.module or "the forward pass"

    @property
    def share(self) -> float:
        """The share of ones in a mask."""
        return float(np.mean(self.value))

    def drawn(self, value: Array) -> Array:
        """What this operation draws where one at location 0 and scale 1 draws these numbers."""
        if self.kind in ("mask", "integer"):
            return value.astype(self.value.dtype)
        if self.operation.name == "random.gumbel":
            return -np.log(value)
        return self.bounds[0] + (self.bounds[1] - self.bounds[0]) * value


def kind_of(operation: Operation) -> str:
    """The kind of random numbers that an operation draws; empty if it draws none, or others."""
    return _KINDS.get(operation.name, "")


def other_draws(trace: Trace) -> Iterator[Draw]:
    """The random numbers on which outputs depend, in the order of execution."""
    reached = trace.ancestors()
    for operation in trace.operations:
        kind = kind_of(operation)
        if kind and operation.outputs[0] in reached:
            value, bounds = trace.values[operation.outputs[0]], _bounds(trace, operation)
            if operation.name == "random.gumbel":
                value = np.exp(-value)
            elif kind != "integer":
                value = (value - bounds[0]) / (bounds[1] - bounds[0])
            yield Draw(operation.outputs[0], operation, value, kind, bounds)


def _bounds(trace: Trace, operation: Operation) -> tuple[float, float]:
    name, settings = operation.name, operation.settings
    if name in ("random.uniform", "random.randint"):
        low, high = (float(trace.values[number].flat[0]) for number in operation.inputs[1:3])
        return low, high
    if name in ("aten.randint", "aten.randint_like"):
        numbers = [value for value in settings.values() if type(value) is int]  # then the sizes
        numbers = numbers[: len(numbers) - trace.values[operation.outputs[0]].ndim * (name == "aten.randint")]
        return (0.0, *map(float, numbers))[-2:]  # pyright: ignore
    first, second = (settings.get(key, default) for key, default in (("1", 0.0), ("2", 1.0)))
    if name == "aten.normal_":
        return first, first + second
    if name == "aten.exponential_":
        return 0.0, 1 / settings.get("1", 1.0)
    return (first, second) if name == "aten.uniform_" else (0.0, 1.0)
