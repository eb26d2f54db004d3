"""Finds where two models diverge: every independent difference, in order of execution, with the lines of both sides.

Both are traced in float64 on the same inputs. Where their values diverge, the candidate continues with the reference's
value, so that later differences are independent of earlier ones. Changes to the candidate are tried until one repairs
it.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from time import process_time
from typing import Any, Literal

import numpy as np

from ..capture.models import capture
from ..capture.trace import Trace
from ..matching.alignment import Pairing
from ..matching.matching import EXACT, ROUNDED, Matches, Side, output_pairs, same_order, with_common_outputs
from ..matching.samples import Samples
from ..matching.uses import with_uses
from ..matching.weights import WeightMap, match_weights
from .defect import Defect
from .divergence import in_order, next_step, output_step, outputs_agree
from .edits import FLOAT32, Repair, edited
from .float32_constants import explain
from .state import State

MAX_DEFECTS = 24
_SECONDS = 20.0  # of processor time, in which differences and repairs are searched for
_RUNS = 50  # times that both models could run, if that takes longer
_MOST_SECONDS = 240.0  # whatever they take
_NOWHERE = "the outputs differ, but no diverging operation was found"
_FEW = 8  # changes, up to which each is left out for once
_SMALL = 1e-4  # errors below which differences may have added up unnoticed


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, and what it rests on."""

    verdict: Literal["equal", "equal but for float32 constants", "different", "undecided"]
    defects: tuple[Defect, ...] = ()
    roundings: tuple[Defect, ...] = ()  # constants that one side has in float32
    weights: WeightMap | None = None
    reason: str = ""  # of "undecided", and of "different" without a place
    unused_parameters: tuple[str, ...] = ()  # of the candidate, in these inputs
    branches: tuple[str, ...] = ()  # that these inputs did not take
    rearranged: tuple[str, ...] = ()  # outputs with the reference's numbers in another shape, such as channels last
    matched: tuple[int, int] = (0, 0)  # values of the reference that the candidate has, and all that identify something
    verified: bool = False  # whether all outputs agree after all repairs, computed from the inputs on
    pairing: Pairing | None = field(default=None, repr=False)  # None if undecided

    @property
    def ok(self) -> bool:
        """Whether both are the same function on these inputs, but for constants in float32."""
        return self.verdict.startswith("equal")

    def __str__(self) -> str:
        """The verdict, the defects in order of execution, and what these inputs did not reach."""
        lines = [self.verdict + (f": {self.reason}" if self.reason else "")]
        lines += [f"{i}. {defect}" for i, defect in enumerate(self.defects, 1)]
        lines += [f"float32: {defect}" for defect in self.roundings]
        lines += [f"no output depends on {', '.join(self.unused_parameters)}"] if self.unused_parameters else []
        lines += [f"not reached: {branch}" for branch in self.branches]
        lines += [f"output {sentence}" for sentence in self.rearranged]
        return "\n".join(lines)


def diagnose(
    reference: Any, candidate: Any, inputs: Sequence[Any], candidate_inputs: Sequence[Any] | None = None
) -> Diagnosis:
    """Compare two models with the same weights: torch modules, NNX, Linen or Equinox modules, or functions.

    A function is given as a pair (function of `(parameters, *inputs)`, parameters), in PyTorch if its parameters are
    tensors. `candidate_inputs`: the same inputs where the candidate wants them otherwise, such as channels last.

    Raises:
        CaptureError: a model cannot be traced.
    """
    others = inputs if candidate_inputs is None else candidate_inputs
    traces, _ = with_common_outputs((capture(reference, inputs), capture(candidate, others)))
    return diagnose_traces(*traces)


@np.errstate(all="ignore")  # some masks are filled with the largest number that a dtype has
def diagnose_traces(
    reference: Trace, candidate: Trace, weights: WeightMap | None = None, least: float = 0.0, bound: float = EXACT
) -> Diagnosis:
    """The diagnosis from traces of both; outputs are compared relative to their largest number, or to `least`.

    `bound`: ROUNDED if differences of that size are explained already.
    """
    weights = weights or trace_weights(reference, candidate)
    about = Diagnosis(
        "undecided",
        weights=weights,
        unused_parameters=tuple(candidate.unused_parameters()),
        branches=tuple(candidate.branches),
    )
    reason = _incomparable(reference, candidate, weights)
    if reason:
        return replace(about, reason=reason)
    pairs = ((reference.outputs[a], candidate.outputs[b]) for a, b in output_pairs(reference, candidate))
    equal = all(same_order(reference.values[a], candidate.values[b], bound, least) for a, b in pairs)
    apart = with_uses(candidate)
    walks = _Walks((Side(reference), Side(apart)), Samples((reference, apart), weights), least)
    walk = walks.walked((bound,) if equal or bound == ROUNDED else (ROUNDED, bound))
    is_small = any(defect.error < _SMALL and not defect.rounding for defect in walk.defects)
    plain = walk.verified and all(d.repair is not None and len(d.repair.edits) == 1 for d in walk.defects)
    deadline = walk.state.candidate.deadline
    if walk.state.bound < ROUNDED and not equal and is_small and not plain and not deadline.is_over:
        # small differences that add up may look like others: whichever bound explains more is taken
        walk = min(walk, walks.walked((bound,)), key=_Walk.unexplained)
    ends, unrepaired = set(candidate.outputs.values()), any(defect.repair is None for defect in walk.defects)
    at_the_end = any(change.repair is None and change.other in ends for change in walk.state.taken)
    if unrepaired and at_the_end and not deadline.is_over:
        # values in between may have been taken for others: perhaps one change up to the outputs explains all
        walk = min(walks.walked((bound,), whole=True), walk, key=_Walk.unexplained)
    state, ordered = walk.state, walk.defects
    about = replace(
        about,
        defects=tuple(d for d in ordered if not d.rounding),
        roundings=tuple(d for d in ordered if d.rounding),
        rearranged=tuple(state.rearranged_outputs),
        matched=state.matched,
        verified=walk.verified,
        pairing=Pairing(
            {n: others for n, others in state.matches.of_candidate.items() if n < len(candidate.values)},
            (frozenset(state.reference.contents), frozenset(state.candidate.contents)),
        ),
    )
    if state.open_outputs and state.bound == EXACT and about.roundings and not about.defects:
        return replace(about, verdict="equal but for float32 constants")  # the outputs agree in the other bound
    if deadline.is_over:
        return replace(about, verdict="different", reason=f"the search stopped after {deadline.seconds:.0f} s")
    if state.open_outputs and len(ordered) == MAX_DEFECTS:
        return replace(about, verdict="different", reason=f"stopped after {MAX_DEFECTS} differences")
    if state.open_outputs and not about.roundings:
        return replace(about, verdict="different", reason=state.exchanged_outputs() or _NOWHERE)
    if about.defects:
        return replace(about, verdict="different")
    return replace(about, verdict="equal but for float32 constants" if about.roundings else "equal")


@dataclass(frozen=True)
class _Walk:
    """The state in which no difference is left, or none that can be placed, and those that were taken out."""

    state: State
    defects: Sequence[Defect]  # in order of execution
    verified: bool

    def unexplained(self) -> tuple[int, ...]:
        """What speaks against it, the most important first."""
        unrepaired = sum(defect.repair is None for defect in self.defects)
        repairs = len({str(defect.repair) for defect in self.defects})
        return self.state.open_outputs, unrepaired, not self.verified, repairs, len(self.defects)


class _Walks:
    """From the inputs to the outputs of two traces, in several ways."""

    def __init__(self, sides: tuple[Side, Side], samples: Samples, least: float):
        self.sides, self.samples, self.least = sides, samples, least
        self.alike: bool | None = None  # whether other inputs lead to equal values too; None: not tried yet

    def walked(self, bounds: Sequence[float], whole: bool = False) -> _Walk:
        """Take out one difference after the other; each bound is walked after all outputs agree in the one before.

        `whole`: only differences that reach up to an output.
        """
        differences: list[tuple[int, Defect]] = []
        first = Matches(*self.sides, bounds[0])
        parts = _parts(*self.sides)
        state = State(*self.sides, first, self.least)
        if state.open_outputs and self.alike is None:
            start = process_time()
            self.alike = self.samples.are_alike(state.matches)
            state.candidate.deadline.start(max(_SECONDS, min(_RUNS * (process_time() - start), _MOST_SECONDS)))
        samples = self.samples if self.alike else None
        state.samples = samples
        closed: State | None = None  # after all that differs by more than rounding
        for bound, outputs in product(bounds, parts):
            if bound != state.bound:
                closed = state
                sides = state.reference, state.candidate
                others = {"entering": state.entering, "samples": samples, "taken": state.taken}
                state = State(*sides, Matches(*sides, bound), self.least, limit=ROUNDED, **others)
            first = state.matches
            if len(parts) > 1:
                state = state.with_outputs(*outputs)
            while state.open_outputs and len(differences) < MAX_DEFECTS:
                if differences and state.candidate.deadline.is_over:
                    break
                step = output_step(state) if whole else next_step(state)
                if step is None:
                    break
                number, defect, state = step
                differences += [] if defect.follows else [(number, defect)]
            if state.open_outputs:
                break
        small = [defect.repair is None and defect.error <= FLOAT32 for _, defect in differences]
        is_stuck = bool(state.open_outputs) and closed is not None and bool(differences)
        constants: list[Repair] = []
        if any(small) or is_stuck:
            reference, candidate = self.samples.after((), 0)
            repairs = [c.repair for c in state.taken if c.repair is not None and not c.repair.rounding]
            repaired = edited((reference, candidate), in_order(state, [e for repair in repairs for e in repair.edits]))
            constants = explain((reference, repaired), first, [(r, c) for r, c, _ in state.pairs])
        if is_stuck and closed is not None:  # what is left is no more than rounding
            state = closed
        if constants:
            differences = [each for each, is_small in zip(differences, small, strict=True) if not is_small]
            if not any(defect.rounding for _, defect in differences):
                differences += [_rounded(repair) for repair in constants]
        if not state.open_outputs and not constants:
            needed = self._needed(state)
            repairs = [change.repair for change in needed.taken]
            if len(needed.taken) < len(state.taken):
                state = needed
                differences = [each for each in differences if any(each[1].repair is repair for repair in repairs)]
        defects = [defect for _, defect in sorted(differences, key=lambda entry: (_is_rounding(entry[1]), entry[0]))]
        repaired = defects and all(defect.repair is not None for defect in defects) and not state.open_outputs
        verified = bool(repaired) and outputs_agree(state, self.samples, 2 if self.alike else 1)
        return _Walk(state, defects, verified)

    def _needed(self, state: State) -> State:
        """The state without the changes that have no effect on the outputs, as in rows of padding that no output needs.

        Only repairs can tell: a value that is taken from the reference, as where a step is missing, hides all
        differences before it.
        """
        needed, count = copy(state), 2 if self.alike else 1
        needed.taken = tuple(change for change in state.taken if change.repair is not None)
        is_rounded = any(change.repair is not None and change.repair.rounding for change in state.taken)
        if is_rounded or not needed.taken:
            return state
        if needed.taken != state.taken and not outputs_agree(needed, self.samples, count):
            return state
        for change in needed.taken if 1 < len(needed.taken) <= _FEW else ():
            fewer = copy(needed)
            fewer.taken = tuple(other for other in needed.taken if other is not change)
            is_hidden = any(other.is_of_the_reference and other.other > change.other for other in fewer.taken)
            if fewer.taken and not is_hidden and outputs_agree(fewer, self.samples, count):
                needed = fewer
        return needed


def _parts(reference: Side, candidate: Side) -> list[tuple[dict[str, int], dict[str, int]]]:
    """The outputs in the order in which their differences are found: first those for which no gradient is needed."""
    outputs = reference.trace.outputs, candidate.trace.outputs
    later = [side.trace.dependents(side.trace.derived) for side in (reference, candidate)]
    pairs = output_pairs(reference.trace, candidate.trace)
    first = [(a, b) for a, b in pairs if outputs[0][a] not in later[0] and outputs[1][b] not in later[1]]
    if not 0 < len(first) < len(pairs):
        return [outputs]
    return [({a: outputs[0][a] for a, _ in first}, {b: outputs[1][b] for _, b in first}), outputs]


def _is_rounding(defect: Defect) -> bool:
    """Whether it may be a rounding that no constant explains: listed after the others."""
    return defect.repair is None and defect.error <= ROUNDED


def _rounded(repair: Repair) -> tuple[int, Defect]:
    """(where it stands in the order, the constant as a difference)."""
    operations = () if repair.operation is None else (repair.operation,)
    return 0, Defect(operations, operations, FLOAT32, repair)


def trace_weights(reference: Trace, candidate: Trace) -> WeightMap:
    """Which parameters of two traces have the same values."""
    return match_weights(*({n: t.values.kept(i) for n, i in t.parameters.items()} for t in (reference, candidate)))


def _incomparable(reference: Trace, candidate: Trace, weights: WeightMap) -> str:
    """Why these traces cannot be compared; empty if they can."""
    for name in reference.given.keys() & candidate.given.keys():
        if not _same_numbers(name, reference, candidate):
            return f"input {name} differs between the candidate and the reference"
    sizes = [sorted(t.values[i].size for i in t.outputs.values()) for t in (reference, candidate)]
    if sizes[0] != sizes[1]:
        return f"the outputs have {sizes[0]} and {sizes[1]} elements"
    ends = [trace.values[n] for trace in (reference, candidate) for n in trace.outputs.values()]
    if not any(sizes[0]):
        return "the outputs are empty; pass inputs that are not empty"
    if not any(value.dtype.kind != "f" or np.isfinite(value).any() for value in ends):
        return "no element of the outputs is finite"
    if all(value.size < 2 or (value == value.flat[0]).all() for value in ends) and max(sizes[0]) > 1:
        return "all elements of the outputs are equal; pass inputs for which they differ"
    if all(value.size == 1 and value.dtype.kind in "fc" and not value.any() for value in ends):
        return "the outputs are 0; pass inputs for which they are not"
    if 2 * len(weights.unmatched) > len(candidate.parameters):
        count, names = len(weights.unmatched), ", ".join(weights.unmatched[:3])
        return (
            f"{count} of {len(candidate.parameters)} parameters have values that the reference does not have: {names}"
        )
    return ""


def _same_numbers(name: str, reference: Trace, candidate: Trace) -> bool:
    """Whether an input has the same numbers on both sides, in any order."""
    one, other = (np.sort(t.values[t.given[name]], axis=None) for t in (reference, candidate))
    return one.size == other.size and bool(np.allclose(one, other, equal_nan=True))
