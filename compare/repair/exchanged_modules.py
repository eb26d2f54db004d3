"""Repairs that compute a value with the parameters of another of the candidate's modules."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..capture.trace import Operation
from ..matching.matching import Side, producers
from ..matching.regions import Region
from .edits import Edit, Repair, Sides

Array = np.ndarray
_CHAIN = 48  # operations that lead to a value


def exchanged_modules(side: Side, region: Region) -> Iterator[Repair]:
    """A region with a module in another's place, which is used elsewhere too, or which makes what enters the region."""
    modules = _Modules(side)
    yield from _of_region(side, region, modules)
    yield from _unused(side, region, modules)


class _Modules:
    """The parameters of the candidate by module."""

    def __init__(self, side: Side):
        self.side = side
        self.names = {number: name for name, number in side.trace.parameters.items()}
        self.numbers: dict[str, dict[str, int]] = {}  # module -> the names of its parameters within it -> number
        for name, number in side.trace.parameters.items():
            module, _, own = name.rpartition(".")
            self.numbers.setdefault(module, {})[own] = number

    def of(self, numbers: Container[int]) -> list[str]:
        """The modules that have one of these parameters."""
        return sorted({name.rpartition(".")[0] for number, name in self.names.items() if number in numbers})

    def shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """The shapes of its parameters."""
        return {own: self.side.value(number).shape for own, number in self.numbers[module].items()}

    def exchanged(self, module: str, other: str) -> dict[int, int]:
        """Number of each parameter of a module -> that of the other module's."""
        return {number: self.numbers[other][own] for own, number in self.numbers[module].items()}

    def repair(self, place: tuple[Operation, int], module: str, other: str, edit: Edit) -> Repair:
        """The repair at the line that calls the module, in the code of the one that owns it."""
        operation, number = place
        owner = self.side.trace.code.get(module.rpartition(".")[0])
        inner = next((i for i, line in enumerate(operation.lines) if owner and line in owner), 0)
        operation = replace(operation, lines=operation.lines[inner:])
        return Repair(number, f"{module} should be {other}", operation, edits=((number, edit),))


def _of_region(side: Side, region: Region, modules: _Modules) -> Iterator[Repair]:
    """Another module instead of one that is used elsewhere too."""
    inside = set(map(id, region.operations))
    shared = {n for o in side.trace.operations if id(o) not in inside for n in o.inputs}
    shared.discard(region.end)  # an output that is a parameter: no operation uses it
    for module in modules.of(shared.intersection(region.leaves)):
        for other in modules.numbers:
            if other != module and modules.shapes(other) == modules.shapes(module):
                exchanged = modules.exchanged(module, other)
                first, number = _joined(region, exchanged)
                edit = partial(_with_other_module, exchanged, region.operations, number)
                yield modules.repair((first, number), module, other, edit)


def _unused(side: Side, region: Region, modules: _Modules) -> Iterator[Repair]:
    """A module that nothing uses, instead of another: what enters is right elsewhere, as keys are among queries."""
    unused = set(side.trace.unused_parameters())
    idle = [m for m, numbers in modules.numbers.items() if all(f"{m}.{own}" in unused for own in numbers)]
    chain = _leading_to(side, region.leaves) if idle else []
    operations = [*chain, *region.operations]
    for module in modules.of({number for operation in chain for number in operation.inputs}):
        for other in idle:
            more = [number for own, number in modules.numbers[other].items() if own not in modules.numbers[module]]
            if modules.shapes(module).items() <= modules.shapes(other).items() and len(more) < 2:
                exchanged = modules.exchanged(module, other)
                first = next(o for o in chain if not exchanged.keys().isdisjoint(o.inputs))
                bias = (first.outputs[0], more[0]) if more else None
                edit = partial(_with_other_module, exchanged, operations, region.end, bias=bias)
                yield modules.repair((first, region.end), module, other, edit)


def _leading_to(side: Side, numbers: Sequence[int]) -> list[Operation]:
    """The last operations that lead to these values, in order of execution."""
    made = producers(side.trace)
    found: dict[int, Operation] = {}
    open_values = list(numbers)
    while open_values and len(found) < _CHAIN:
        operation = made.get(open_values.pop(0))
        if operation is not None and id(operation) not in found:
            found[id(operation)] = operation
            open_values += operation.inputs
    return [operation for operation in side.trace.operations if id(operation) in found]


def _joined(region: Region, parameters: Container[int]) -> tuple[Operation, int]:
    """(the region's first operation with one of these parameters, the first value that depends on all it has)."""
    reached: dict[int, set[int]] = {n: {n} for n in region.leaves if n in parameters}
    count, first = len(reached), None
    for operation in region.operations:
        sources = set[int]().union(*(reached.get(n, ()) for n in operation.inputs))
        first = operation if sources and first is None else first
        reached.update((n, sources) for n in operation.outputs)
        if first is not None and len(sources) == count:
            return first, operation.outputs[0]
    raise AssertionError("the region's end depends on all that enters it")


def _with_other_module(
    exchanged: Mapping[int, int],
    operations: Sequence[Operation],
    number: int,
    sides: Sides,
    bias: tuple[int, int] | None = None,
) -> dict[int, Array]:
    """A value that is computed with the parameters of another module.

    `bias`: a product, and what only the other module adds to it.
    """
    changes = {own: sides[1].value(other) for own, other in exchanged.items()}
    if bias is not None:
        product, added = bias
        before = sides[1].replay(changes, operations).get(product, sides[1].value(product))
        changes = {product: before + sides[1].value(added)}
    return {number: sides[1].replay(changes, operations).get(number, sides[1].value(number))}
