"""Finds where the gradients of two models with equal outputs diverge."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from ..capture.models import capture
from ..capture.recording import SEED, Recording
from ..capture.trace import CaptureError, Operation, Trace, own_lines
from ..matching.matching import EXACT, ROUNDED, difference, output_layout, output_pairs
from ..matching.weights import Match, Part, WeightMap
from ..repair.defect import Defect
from ..repair.diagnosis import Diagnosis, diagnose_traces, trace_weights
from ..repair.edits import Repair
from .dropout import capture_in_training

_FLOOR = 1e-10  # of the largest gradient: a smaller one is zero in exact arithmetic, such as that of a key's bias

Array = np.ndarray


def diagnose_gradients(
    models: tuple[Any, Any],
    inputs: tuple[Sequence[Any], Sequence[Any]],
    traces: tuple[Trace, Trace],
    outputs: Diagnosis,
    dropout: bool = False,
) -> Diagnosis:
    """Compare the gradients of Σ output · cotangent with random cotangents, per parameter of the reference.

    `traces`, `outputs`: of the forward pass, and that its outputs are equal. Gradients of parameters that the map
    splits, joins or adds are compared in the reference's arrangement. `dropout`: whether both are in training mode.

    Raises:
        CaptureError: a backward pass cannot be traced.
    """
    for trace in traces:
        for name, number in trace.parameters.items():
            if trace.values[number].dtype.kind == "c":
                raise CaptureError(f"{name}: gradients of complex parameters are not compared")
    weights = outputs.weights or trace_weights(*traces)
    bound = EXACT if outputs.verdict == "equal" else ROUNDED  # which constants in float32 explain
    recorded = [(model.factors or None) if isinstance(model, Recording) else None for model in models]
    factors = cotangents(*traces, recorded)
    reference, candidate = _captured(models, inputs, factors, dropout)
    infinite = _infinite(reference, candidate)
    if infinite is not None:
        return Diagnosis("different", (infinite,), weights=weights)
    pair = _Gradients(reference, candidate, weights, bound)
    stops: list[Defect] = []
    for operation in _stops(candidate) if pair.differing else ():
        with _without_stop(operation.line):
            other = _Gradients(*_captured(models, inputs, factors, dropout), weights, bound)
        if len(other.differing) < len(pair.differing):
            error = max(pair.differing[name] for name in pair.differing.keys() - other.differing.keys())
            repair = Repair(operation.outputs[0], f"without {operation.name}", operation)
            stops.append(Defect((), (operation,), error, repair))
            pair = other
    diagnosis = diagnose_gradient_traces(reference, pair.candidate, weights, bound)
    if not stops:
        return diagnosis
    verified = diagnosis.verified or diagnosis.ok
    return replace(diagnosis, verdict="different", defects=(*stops, *diagnosis.defects), verified=verified)


def _captured(models: Any, inputs: Any, factors: Any, dropout: bool) -> tuple[Trace, Trace]:
    if dropout:
        return capture_in_training(models, inputs, factors)[:2]
    reference, candidate = (capture(*each) for each in zip(models, inputs, factors, strict=True))
    return reference, candidate


def diagnose_gradient_traces(reference: Trace, candidate: Trace, weights: WeightMap, bound: float = EXACT) -> Diagnosis:
    """The same from traces with gradients."""
    pair = _Gradients(reference, candidate, weights, bound)
    missing_gradients = tuple(pair.missing_gradients())
    diagnosis = diagnose_traces(*pair.traces, weights, least=_FLOOR / ROUNDED * pair.largest, bound=bound)
    diagnosis = replace(diagnosis, unused_parameters=(), branches=())  # which the forward pass names
    if not missing_gradients:
        return diagnosis
    return replace(diagnosis, verdict="different", defects=(*missing_gradients, *diagnosis.defects))


def _infinite(reference: Trace, candidate: Trace) -> Defect | None:
    """Where numbers of the backward pass that lead to a gradient are first infinite or NaN, on one side only."""
    places = [_first_infinite(trace) for trace in (reference, candidate)]
    for place, other, side in zip(places, places[::-1], ("the reference", "the candidate"), strict=True):
        if place is not None and other is None:
            line = place.line or place.module
            note = f"{line} ({place.name}): the gradient of {side} is infinite or NaN from here on"
            return Defect((), (place,), float("inf"), note=note)
    return None


def _first_infinite(trace: Trace) -> Operation | None:
    forward, backward = trace.ancestors(trace.outputs.values()), trace.ancestors(trace.gradients.values())
    infinite: set[int] = set()
    for operation in trace.operations:
        numbers = [n for n in operation.outputs if n in backward and n not in forward]
        if any(not np.isfinite(trace.values[n]).all() for n in numbers):
            infinite.update(numbers)
    ends = infinite.intersection(trace.gradients.values())
    leading = trace.ancestors(ends) if ends else set()
    return next((o for o in trace.operations if not (infinite & leading).isdisjoint(o.outputs)), None)


class _Gradients:
    """Two traces whose outputs are the gradients of the reference's parameters, and which of them differ."""

    def __init__(self, reference: Trace, candidate: Trace, weights: WeightMap, bound: float):
        self.candidate = candidate
        covered = _covered(reference, weights)
        self.traces = _as_outputs(reference, weights, covered), _rearranged(candidate, reference, weights, covered)
        self.untrained = self._untrained(weights, covered)
        if self.untrained:
            self.traces = _as_outputs(reference, weights, covered), _rearranged(candidate, reference, weights, covered)
        for trace, before in zip(self.traces, (reference, candidate), strict=True):
            trace.settled = frozenset(before.ancestors(before.outputs.values()))
        sizes = {
            n: [float(np.abs(t.values[t.outputs[n]]).max(initial=0)) for t in self.traces]
            for n in self.traces[0].outputs
        }
        self.largest = max((size for pair in sizes.values() for size in pair), default=0.0)
        self.sizes = {name: pair for name, pair in sizes.items() if max(pair) > _FLOOR * self.largest}
        self.differing = dict.fromkeys(self.untrained, 1.0)
        for name in sizes.keys() - self.sizes.keys():  # zero in exact arithmetic
            self._drop(name)
        self.differing |= {name: error for name in self.sizes if (error := self._error(name)) > bound}

    def _drop(self, name: str) -> None:
        for trace in self.traces:
            del trace.outputs[name]

    def _error(self, name: str) -> float:
        one, other = (t.values[t.outputs[name]] for t in self.traces)
        return float(difference(one, other).max(initial=0)) / max(*self.sizes[name], 1e-1 * self.largest)

    def _untrained(self, weights: WeightMap, covered: Mapping[str, Array]) -> list[str]:
        """The candidate's parameters without a gradient where the reference has one; they are no longer covered."""
        flat: list[dict[str, Array]] = []
        for trace in self.traces:
            flat.append({name: np.zeros(places.size) for name, places in covered.items()})
            for name, places in covered.items():
                flat[-1][name][places] = trace.values[trace.outputs[name]].ravel()
        least = ROUNDED * max((float(np.abs(array).max(initial=0)) for array in flat[0].values()), default=0.0)
        untrained = []
        for target, match in weights.matches.items():
            gradient = self.candidate.gradients.get(target)
            if gradient is not None and self.candidate.values[gradient].any():
                continue
            parts = [(name, _places(part)) for part in match.parts for name in _sources_of(part, match)]
            if any(np.abs(flat[0][name][p] - flat[1][name][p]).max(initial=0) > least for name, p in parts):
                untrained.append(target)
                for name, places in parts:
                    covered[name][places] = False
        return untrained

    def missing_gradients(self) -> Iterator[Defect]:
        """Parameters with a gradient on one side only; they are no longer compared."""
        for name in self.untrained:
            yield Defect((), (), 1.0, note=f"{name}: no gradient in the candidate, so it is not trained there")
        for name, (one, _) in self.sizes.items():
            if one == 0:
                self._drop(name)
                yield Defect((), (), 1.0, note=f"{name}: no gradient in the reference, so it is not trained there")


def _stops(trace: Trace) -> list[Operation]:
    """Operations that end the gradient, one per line; those that autograd itself inserts lead to no output."""
    forward = trace.ancestors(trace.outputs.values())
    stops = (
        o for o in trace.operations if o.name in ("stop_gradient", "aten.detach") and forward.issuperset(o.outputs)
    )
    return list({operation.line: operation for operation in stops}.values())


@contextmanager
def _without_stop(line: str) -> Iterator[None]:
    """Within the context, stop_gradient and detach return their input where this line calls them."""
    import jax

    def passing(original: Any) -> Any:
        def run(value: Any) -> Any:
            frame = sys._getframe(1)
            return value if line in own_lines([(frame.f_code.co_filename, frame.f_lineno)]) else original(value)

        return run

    places: list[tuple[Any, str]] = [(jax.lax, "stop_gradient")]
    places += [(sys.modules["torch"].Tensor, "detach")] if "torch" in sys.modules else []
    with ExitStack() as patches:
        for owner, name in places:
            patches.enter_context(patch.object(owner, name, passing(getattr(owner, name))))
        yield


def cotangents(
    reference: Trace, candidate: Trace, recorded: Sequence[Mapping[str, Array] | None] = (None, None)
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random cotangents of the outputs, or those that a side was recorded with; the candidate's have its own layout.

    Buffers that the models write to have none.
    """
    random = np.random.default_rng(SEED)
    factors: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
    for name, other in output_pairs(reference, candidate):
        value, target = reference.values[reference.outputs[name]], candidate.values[candidate.outputs[other]]
        if value.dtype.kind == "f" and name not in reference.buffers and other not in candidate.buffers:
            layout = output_layout(value, target)
            places = np.arange(value.size).reshape(value.shape)  # where each of the candidate's elements is
            places = layout.apply(places) if layout is not None else places.reshape(target.shape)
            factor = random.standard_normal(value.size)
            if recorded[0] is not None:
                factor = recorded[0][name].ravel()
            elif recorded[1] is not None:
                factor[places.ravel()] = recorded[1][other].ravel()
            factors[0][name], factors[1][other] = factor.reshape(value.shape), factor[places]
    return factors


def _covered(reference: Trace, weights: WeightMap) -> dict[str, Array]:
    """Where in each parameter of the reference the candidate's gradients are known: not where it stores sums alone."""
    covered = {name: np.zeros(reference.values[reference.parameters[name]].size, bool) for name in _sources(weights)}
    for match in weights.matches.values():
        for part in match.parts:
            for name in _sources_of(part, match):
                covered[name][_places(part)] = True
    return covered


def _as_outputs(trace: Trace, weights: WeightMap, covered: Mapping[str, Array]) -> Trace:
    """A trace of the reference whose outputs are its gradients; those of tied parameters are added."""
    trace = _extended(trace)
    for name in _sources(weights):
        same = [name, *weights.ties.get(name, ())]
        parts = {
            trace.gradients[n]: (np.arange(trace.values[trace.gradients[n]].size), ...)
            for n in same
            if n in trace.gradients
        }
        _add_sum(trace, name, trace.values[trace.parameters[name]].shape, list(parts.items()), covered[name])
    return trace


def _rearranged(trace: Trace, reference: Trace, weights: WeightMap, covered: Mapping[str, Array]) -> Trace:
    """A trace of the candidate whose outputs are the gradients of the reference's parameters."""
    trace = _extended(trace)
    for name in _sources(weights):
        shape = reference.values[reference.parameters[name]].shape
        parts: dict[tuple[int, int], tuple[int, tuple[Array, Any]]] = {}
        for target, match in weights.matches.items():
            if target not in trace.gradients:
                continue
            number = trace.gradients[target]
            if match.added_to == name:
                parts[number, 0] = number, (_places(match.parts[0]), match.parts[0].region)
            for part in match.parts:
                if part.source == name:
                    parts[number, part.layout.start] = number, (_places(part), part.region)
        _add_sum(trace, name, shape, list(parts.values()), covered[name])
    return trace


def _sources(weights: WeightMap) -> list[str]:
    return list(dict.fromkeys(source for match in weights.matches.values() for source in match.sources))


def _sources_of(part: Part, match: Match) -> tuple[str, ...]:
    return (part.source, match.added_to) if match.added_to else (part.source,)


def _places(part: Part) -> Array:
    """Where in the flat source each element of a part comes from."""
    return part.layout.apply(np.arange(part.layout.source_size)).ravel()


def _extended(trace: Trace) -> Trace:
    trace = copy(trace)
    trace.values, trace.operations, trace.outputs = trace.values.with_changes({}), list(trace.operations), {}
    return trace


def _add_sum(
    trace: Trace, name: str, shape: Sequence[int], parts: Sequence[tuple[int, tuple[Array, Any]]], covered: Array
) -> None:
    """Add an output: the sum of parts of gradients, each at its places in a parameter of this shape."""

    def compute(arrays: Sequence[Array], settings: Mapping[str, Any]) -> list[Array]:
        total = np.zeros(int(np.prod(shape)))
        for array, (_, (places, region)) in zip(arrays, parts, strict=True):
            total[places] += array[region].ravel()
        return [total.reshape(shape) if covered.all() else total[covered]]

    inputs = tuple(number for number, _ in parts)
    number = trace.add(compute([trace.values[n] for n in inputs], {})[0])
    trace.operations.append(Operation("gradient", inputs, (number,), name, (), {}, compute))
    trace.outputs[name] = number
