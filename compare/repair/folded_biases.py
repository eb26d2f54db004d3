"""A bias that a port adds to another one, though something happens between the two, as in the reset gate of a GRU."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.matching import producers
from ..matching.weights import Match, WeightMap
from .edits import Edits, Repair, Sides


def unfolded(traces: tuple[Trace, Trace], weights: WeightMap) -> Iterator[tuple[Repair, Sequence[Operation]]]:
    """(repair, operations of the reference that use the bias): the bias is added where the reference adds it."""
    for match in weights.matches.values():
        if match.added_to and match.name in traces[1].parameters:
            for kept, moved in (match.sources, match.sources[::-1]):
                users = [operation for operation, _ in _uses(traces[0], [moved])]
                yield from _counted_twice(traces, weights, match, kept, moved, users)
                products = _products(traces, weights, moved, users)
                if products:
                    text = f"missing: + {moved}, which {match.name} contains instead"
                    edits = _edits(traces, match, kept, moved, products)
                    yield Repair(products[0].outputs[0], text, products[0], edits=edits), users


def _counted_twice(
    traces: tuple[Trace, Trace], weights: WeightMap, match: Match, kept: str, moved: str, users: Sequence[Operation]
) -> Iterator[tuple[Repair, Sequence[Operation]]]:
    """Part of the bias that is added is a parameter of its own too, as in a GRU that has only the last gate's apart."""
    number = traces[1].parameters[match.name]

    def without(first: int, last: int, sides: Sides) -> dict[int, np.ndarray]:
        one, two = (np.ravel(sides[0].value(traces[0].parameters[name])) for name in (kept, moved))
        places = np.arange(two.size)
        total = one + np.where((first <= places) & (places <= last), 0, two)
        return {number: match.parts[0].layout.apply(total).reshape(sides[1].value(number).shape)}

    for name, other in weights.matches.items():
        if [part.source for part in other.parts] == [moved] and not other.added_to:
            layout = other.parts[0].layout
            places = layout.apply(np.arange(layout.source_size))
            first, last = int(places.min()), int(places.max())
            if places.size == last - first + 1:
                operation = next((o for o in traces[1].operations if number in o.inputs), None)
                text = f"without {moved}[{first}:{last + 1}], which {name} adds too"
                edits = ((number, partial(without, first, last)),)
                yield Repair(number, text, operation, match.name, edits=edits), users


def _edits(traces: tuple[Trace, Trace], match: Match, kept: str, moved: str, products: Sequence[Operation]) -> Edits:
    """The parameter is one of the two that it adds; the other one is added to each product."""
    sources, number = [traces[0].parameters[name] for name in (kept, moved)], traces[1].parameters[match.name]

    def alone(sides: Sides) -> dict[int, np.ndarray]:
        value = match.parts[0].layout.apply(sides[0].value(sources[0]))
        return {number: value.reshape(sides[1].value(number).shape)}

    def added(number: int, sides: Sides) -> dict[int, np.ndarray]:
        return {number: sides[1].value(number) + match.parts[0].layout.apply(sides[0].value(sources[1])).ravel()}

    return ((number, alone), *((o.outputs[0], partial(added, o.outputs[0])) for o in products))


def _products(
    traces: tuple[Trace, Trace], weights: WeightMap, bias: str, users: Sequence[Operation]
) -> list[Operation]:
    """The candidate's products with the weights that the reference uses together with a bias."""
    reference, candidate = traces
    size = reference.values[reference.parameters[bias]].size
    beside = {name for operation in users for name in _parameters(reference, operation) if name != bias}
    own = [name for name, match in weights.matches.items() if beside.intersection(match.sources)]
    uses = [operation for operation, _ in _uses(candidate, own) if len(operation.inputs) > 1]
    return [o for o in uses if candidate.values[o.outputs[0]].shape[-1:] == (size,)]


def _uses(trace: Trace, names: Sequence[str]) -> Iterator[tuple[Operation, str]]:
    """The operations with several inputs into which these parameters enter, perhaps transposed."""
    for operation in trace.operations:
        for name in _parameters(trace, operation) if len(operation.inputs) > 1 else ():
            if name in names:
                yield operation, name


def _parameters(trace: Trace, operation: Operation) -> Iterator[str]:
    """Names of the parameters that enter an operation as they are or after steps with one input."""
    names, made = {number: name for name, number in trace.parameters.items()}, producers(trace)
    for number in operation.inputs:
        while number in made and len(made[number].inputs) == 1 and number not in names:
            (number,) = made[number].inputs
        if number in names:
            yield names[number]
