"""Where two models part: every independent difference, in order of execution, with the lines of both sides.

Both are traced in float64 on the same inputs. Where their values part, the candidate goes on with the reference's
value, so that one difference is not blamed for another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np

from .capture.trace import Operation, Trace
from .matching import (
    EXACT,
    ROUNDED,
    Signatures,
    alignments,
    difference,
    distance,
    match_values,
    producers,
    same_order,
    suspects,
)
from .weights import WeightMap, match_weights

Capture = Callable[[Mapping[int, np.ndarray]], Trace]  # (values to replace) -> trace
_CANDIDATES = 12  # of the reference's values after the last common one that are tried
_NO_BETTER = 3  # of them in a row, after which no more are tried
_CLOSEST = 3  # of the candidate's values for each
MAX_DEFECTS = 24
_REARRANGING = (
    *("reshape", "transpose", "squeeze", "expand_dims", "copy", "rev", "aten.view", "aten.transpose", "aten.permute"),
    *("aten.t", "aten.clone", "aten._unsafe_view", "aten.expand", "aten.squeeze", "aten.unsqueeze", "aten.flip"),
)


@dataclass(frozen=True)
class Defect:
    """One difference: the operations between the last values that both models have and the first that differ."""

    reference: tuple[Operation, ...]
    candidate: tuple[Operation, ...]
    error: float  # largest difference, relative to the largest number

    @property
    def lines(self) -> tuple[str, ...]:
        """The candidate's lines in order of execution; modules where a line is unknown."""
        return _lines(self.candidate)

    def __str__(self) -> str:
        sides = [
            f"{' and '.join(_lines(side))} ({', '.join(dict.fromkeys(o.name for o in side))})"
            for side in (self.candidate, self.reference)
        ]
        return f"{sides[0]} differs by {self.error:.1g} from {sides[1]}"


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, and what it rests on."""

    verdict: Literal["equal", "equal but for float32 constants", "different", "undecided"]
    defects: tuple[Defect, ...] = ()
    weights: WeightMap | None = None
    reason: str = ""  # of "undecided", and of "different" without a place
    unused_parameters: tuple[str, ...] = ()  # of the candidate, in these inputs
    branches: tuple[str, ...] = ()  # that these inputs did not take
    rearranged: tuple[str, ...] = ()  # outputs with other axes than the reference's, such as channels last
    matched: tuple[int, int] = (0, 0)  # values of the reference that the candidate has, and all that identify something

    @property
    def ok(self) -> bool:
        """Whether both are the same function on these inputs, but for constants in float32."""
        return self.verdict.startswith("equal")

    def __str__(self) -> str:
        """The verdict, the defects in order of execution, and what these inputs did not reach."""
        lines = [self.verdict + (f": {self.reason}" if self.reason else "")]
        lines += [f"{i}. {defect}" for i, defect in enumerate(self.defects, 1)]
        lines += [f"no output depends on {', '.join(self.unused_parameters)}"] if self.unused_parameters else []
        lines += [f"not reached: {branch}" for branch in self.branches]
        lines += [f"the candidate's output {name} has its axes in another order" for name in self.rearranged]
        return "\n".join(lines)


def diagnose(
    reference: Any, candidate: Any, inputs: Sequence[Any], candidate_inputs: Sequence[Any] | None = None
) -> Diagnosis:
    """Compares two models with the same weights: torch modules, NNX, Linen or Equinox modules, or functions.

    A function is given as a pair (function of (parameters, *inputs), parameters), in PyTorch if its parameters are
    tensors. `candidate_inputs`: the same inputs where the candidate wants them otherwise, such as channels last.

    Raises:
        CaptureError: a model cannot be traced.
    """
    captures = (
        _capture(reference, inputs),
        _capture(candidate, inputs if candidate_inputs is None else candidate_inputs),
    )
    return diagnose_traces(captures[0]({}), captures[1])


def _capture(model: Any, inputs: Sequence[Any]) -> Capture:
    import torch

    leaves = [model] if not isinstance(model, tuple) else _leaves(model[1])
    if any(isinstance(leaf, torch.nn.Module | torch.Tensor) for leaf in leaves):
        from .capture.torch_trace import capture_torch

        return lambda replace: capture_torch(model, inputs, replace=replace)
    from .capture.jax_models import as_function
    from .capture.jax_trace import capture_jax

    function, parameters = as_function(model)
    return lambda replace: capture_jax(function, parameters, inputs, replace=replace)


def _leaves(tree: Any) -> list[Any]:
    from .capture.trace import named

    return [leaf for _, leaf in named(tree)]


def diagnose_traces(reference: Trace, capture: Capture) -> Diagnosis:
    """The diagnosis from a trace of the reference, and a function that traces the candidate."""
    trace = capture({})
    weights = match_weights(*({n: t.values[i] for n, i in t.parameters.items()} for t in (reference, trace)))
    about: dict[str, Any] = {
        "weights": weights,
        "unused_parameters": tuple(trace.unused_parameters()),
        "branches": tuple(trace.branches),
    }
    others = [
        name for name in reference.inputs.keys() & trace.inputs.keys() if not _same_numbers(name, reference, trace)
    ]
    if others:
        reason = f"input {others[0]} has other numbers for the candidate than for the reference"
        return Diagnosis("undecided", reason=reason, **about)
    sizes = [sorted(t.values[i].size for i in t.outputs.values()) for t in (reference, trace)]
    if sizes[0] != sizes[1]:
        return Diagnosis("undecided", reason=f"outputs of {sizes[0]} and of {sizes[1]} numbers", **about)
    signatures = Signatures(reference)
    replace: dict[int, np.ndarray] = {}
    defects: list[Defect] = []
    bound = EXACT
    while len(defects) < MAX_DEFECTS:
        state = _State(signatures, Signatures(trace), bound)
        if not state.open_outputs:
            verdict = "different" if defects else "equal" if bound == EXACT else "equal but for float32 constants"
            about |= {"rearranged": tuple(state.rearranged_outputs), "matched": state.matched}
            return Diagnosis(verdict, tuple(defects), **about)
        if bound == EXACT:
            bound = ROUNDED  # first what is more than rounding
            continue
        if weights.unmatched:
            names = ", ".join(weights.unmatched[:3])
            reason = f"{len(weights.unmatched)} parameters have values that the reference does not have: {names}"
            return Diagnosis("undecided", reason=reason, matched=state.matched, **about)
        step = _next_step(state, capture, replace)
        if step is None:
            reason = "the outputs differ, and replacing no value makes the rest agree"
            return Diagnosis("different", tuple(defects), reason=reason, matched=state.matched, **about)
        defect, number, value, trace = step
        replace[number] = value
        defects.append(defect)
    return Diagnosis("different", tuple(defects), reason=f"stopped after {MAX_DEFECTS} differences", **about)


@dataclass
class _State:
    """Both traces, with what matches and what is suspect."""

    reference: Signatures
    candidate: Signatures
    bound: float
    open_outputs: bool = field(init=False)
    rearranged_outputs: list[str] = field(init=False)
    matched: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.matches = match_values(self.reference, self.candidate, self.bound)
        one, other = self.reference.trace.outputs, self.candidate.trace.outputs
        names = one if one.keys() == other.keys() else other  # by name, or else by order
        pairs = [(r, other[name], name) for r, name in zip(one.values(), names, strict=True)]
        differing = [(r, c) for r, c, _ in pairs if not self._equal(r, c)]
        self.open_outputs = bool(differing)
        self.sides = [
            _live(signatures.trace, suspects(signatures.trace, matched, (pair[side] for pair in differing)))
            for side, (signatures, matched) in enumerate(
                ((self.reference, self.matches.of_reference), (self.candidate, self.matches.of_candidate))
            )
        ]
        values = self.reference.trace.values, self.candidate.trace.values
        self.rearranged_outputs = [name for r, c, name in pairs if not same_order(values[0][r], values[1][c], ROUNDED)]
        self.matched = len(self.matches.of_reference), len(self.reference.by_number)

    def _equal(self, reference: int, candidate: int) -> bool:
        """Equal element by element; in another arrangement only if the shapes differ."""
        one, other = self.reference.trace.values[reference], self.candidate.trace.values[candidate]
        if one.shape != other.shape and candidate in self.matches.of_reference.get(reference, ()):
            return True
        return same_order(one, other, self.bound)

    def rearranged(self) -> Iterator[int]:
        """The candidate's values that the reference has in another flat order only: perhaps transposed by mistake."""
        for number, others in self.matches.of_candidate.items():
            value = self.candidate.trace.values[number]
            if not any(same_order(self.reference.trace.values[n], value, self.bound) for n in others):
                yield number

    def ends(self) -> Iterator[tuple[int, list[int]]]:
        """(value of the reference, the candidate's closest values): where the first difference may end."""
        others = [n for n in self.sides[1] if n in self.candidate.by_number]
        for number in self.sides[0]:
            one = self.reference.by_number.get(number)
            if one is not None:
                near = sorted((distance(one, self.candidate.by_number[n]), n) for n in others)
                close = [n for error, n in near[:_CLOSEST] if error < 1]
                if close:
                    yield number, close


def _same_numbers(name: str, reference: Trace, candidate: Trace) -> bool:
    """Whether an input has the same numbers on both sides, in any order."""
    one, other = (np.sort(t.values[t.inputs[name]], axis=None) for t in (reference, candidate))
    return one.size == other.size and bool(np.allclose(one, other, equal_nan=True))


def _live(trace: Trace, suspect: set[int]) -> list[int]:
    return [number for operation in trace.operations for number in operation.outputs if number in suspect]


def _next_step(state: _State, capture: Capture, replace: Mapping[int, np.ndarray]) -> Any:
    """(defect, number, value, new trace) after which most of what follows matches; None if nothing does."""
    best: Any = None
    worse = 0
    for number, others in islice(state.ends(), _CANDIDATES):
        worse += 1
        for other, value in _replacements(state, number, others):
            trace = capture({**replace, other: value})
            after = _State(state.reference, Signatures(trace), state.bound)
            gain = len(after.matches.of_reference.keys() - state.matches.of_reference.keys() - {number})
            if (gain or not after.open_outputs) and (best is None or gain > best[0]):
                target = state.candidate.trace.values[other]
                largest = np.abs(value[np.isfinite(value)]).max(initial=1e-300)
                error = float(difference(value, target).max() / largest)
                best, worse = (gain, (_defect(state, number, other, error), other, value, trace)), 0
        if best is not None and worse == _NO_BETTER:
            break
    return None if best is None else best[1]


def _replacements(state: _State, number: int, others: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(candidate's value, the reference's value in its shape)."""
    for other in others:
        for value in alignments(state.reference.trace.values[number], state.candidate.trace.values[other]):
            yield other, value


def _defect(state: _State, number: int, other: int, error: float) -> Defect:
    reference = _region(state.reference.trace, set(state.sides[0]), number)
    suspect = {*state.sides[1], *state.rearranged()}
    candidate = _region(state.candidate.trace, suspect | _other_order(state, reference, suspect, other), other)
    return Defect(reference, candidate, error)


def _other_order(state: _State, reference: Sequence[Operation], suspect: set[int], end: int) -> set[int]:
    """Values that enter the candidate's region in another flat order than the reference's; parameters apart."""
    trace, made = state.candidate.trace, producers(state.candidate.trace)
    entering = {n for operation in reference for n in operation.inputs}
    rearranged: set[int] = set()
    for operation in _region(trace, suspect, end):
        for number in operation.inputs:
            sources = entering.intersection(state.matches.of_candidate.get(number, ()))
            value = trace.values[number]
            if sources and not any(same_order(state.reference.trace.values[n], value, state.bound) for n in sources):
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


def _lines(operations: Sequence[Operation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(operation.line or operation.module for operation in operations))
