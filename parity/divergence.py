"""The first place where a candidate's values part from its reference's, and the trace after it is put right."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from .capture.trace import Operation, Trace
from .matching import (
    ROUNDED,
    Matches,
    Side,
    alignments,
    arranged,
    difference,
    distance,
    output_pairs,
    producers,
    proportion,
    same_order,
    suspects,
)
from .repairs import BUDGET, FLOAT32, WEAK, Region, Repair, Search, constants, is_float32

_CANDIDATES = 12  # of the reference's values after the last common one that are tried
_NO_BETTER = 3  # of them in a row, after which no more are tried
_CLOSEST = 3  # of the candidate's values for each
_MORE = 2  # that are nearest to proportional
_EARLIEST = 5  # further ones of its size, in order of execution
_SAME_SIZE = 24  # of the candidate's values that are tried as the only one that differs
_NUMBERS = 5e8  # that all of these attempts compute together
_WINDOW = 60  # operations after a value in which more values match if it is right
_PARAMETERS = 400  # changes of parameters that are tried in the whole trace
_VARIANTS = 2  # of the candidate's values for one of the reference's
_SEARCHED = 8  # of the steps for which repairs are tried
_BUDGET = 3 * BUDGET  # of these attempts together
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
    repair: Repair | None = None  # a change to the candidate that makes both equal
    note: str = ""  # what differs, where it is no operation

    @property
    def rounding(self) -> bool:
        """Whether it is no more than the rounding of a constant to float32."""
        if self.repair is None:
            return self.error <= ROUNDED
        return self.repair.rounding or (self.error <= FLOAT32 and not self.repair.literal)

    @property
    def lines(self) -> tuple[str, ...]:
        """The candidate's lines: that of the repair, or else all in order of execution; modules if unknown."""
        if self.repair is not None and self.repair.operation is not None:
            return _lines([self.repair.operation])
        return _lines(self.candidate)

    def __str__(self) -> str:
        if self.note:
            return self.note
        sides = [
            f"{' and '.join(_lines(side))} ({', '.join(dict.fromkeys(o.name for o in side))})"
            for side in (self.candidate, self.reference)
        ]
        text = f"{sides[0]} differs by {self.error:.1g} from {sides[1]}"
        return text + (f"; equal with {' and '.join(self.lines)}: {self.repair}" if self.repair else "")


@dataclass
class State:
    """Both traces, with what matches and what is suspect."""

    reference: Side
    candidate: Side
    matches: Matches
    least: float = 0.0  # outputs are compared relative to their largest number, or to this if it is larger
    open_outputs: int = field(init=False)  # outputs that differ
    rearranged_outputs: list[str] = field(init=False)
    matched: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.bound = self.matches.bound
        self.limit = np.inf if self.bound >= ROUNDED else ROUNDED  # once nothing but rounding differs, ends are close
        outputs = self.reference.trace.outputs, self.candidate.trace.outputs
        names = output_pairs(self.reference.trace, self.candidate.trace)
        pairs = self.pairs = [(outputs[0][one], outputs[1][other], other) for one, other in names]
        differing = self.differing = [(r, c) for r, c, _ in pairs if not self._equal(r, c)]
        self.open_outputs = len(differing)
        self.suspects = [
            _live(side.trace, suspects(side.trace, self._common(side, other, matched), (pair[i] for pair in differing)))
            for i, (side, other, matched) in enumerate(
                (
                    (self.reference, self.candidate, self.matches.of_reference),
                    (self.candidate, self.reference, self.matches.of_candidate),
                )
            )
        ]
        self.others = self._others()
        values = [(self.reference.value(r), self.candidate.value(c), name) for r, c, name in pairs]
        self.rearranged_outputs = [name for one, other, name in values if not same_order(one, other, ROUNDED)]
        self.matched = len(self.matches.of_reference), len(self.reference.by_number)

    def _others(self) -> list[int]:
        """Suspects of the candidate, and what enters them, after which a step may be missing; in order."""
        suspect = set(self.suspects[1])
        possible: list[int] = []
        for operation in self.candidate.trace.operations:
            if not suspect.isdisjoint(operation.outputs):
                possible += [*operation.inputs, *operation.outputs]
        order = {n: i for i, o in enumerate(self.candidate.trace.operations) for n in o.outputs}
        numbers = {n for n in possible if n in order and n in self.candidate.by_number}
        return sorted(numbers, key=lambda number: order[number])

    @staticmethod
    def _common(side: Side, other: Side, matched: Mapping[int, Any]) -> set[int]:
        """The values of a side that the other has too, with those that identify nothing but in their order."""
        known = set(other.contents.values())
        return {*matched, *(number for number, content in side.contents.items() if content in known)}

    def _equal(self, reference: int, candidate: int) -> bool:
        """Equal element by element; in another arrangement only if the shapes differ."""
        one, other = self.reference.value(reference), self.candidate.value(candidate)
        if one.shape != other.shape and candidate in self.matches.of_reference.get(reference, ()):
            return True
        return same_order(one, other, self.bound, self.least)

    def closed_by(self, changes: Mapping[int, np.ndarray]) -> bool:
        """Whether all outputs agree after these changes to the candidate."""
        values = ((self.reference.value(r), changes.get(c)) for r, c in self.differing)
        return all(
            other is not None
            and (
                same_order(one, other, self.bound, self.least)
                or (one.shape != other.shape and arranged(one, other, self.bound))
            )
            for one, other in values
        )

    def rearranged(self) -> Iterator[int]:
        """The candidate's values that the reference has in another flat order only: perhaps transposed by mistake."""
        for number, others in self.matches.of_candidate.items():
            value = self.candidate.value(number)
            if not any(same_order(self.reference.value(n), value, self.bound) for n in others):
                yield number

    def ends(self) -> Iterator[tuple[int, list[int]]]:
        """(value of the reference, similar values of the candidate): where the first difference may end."""
        for number in self.suspects[0]:
            one = self.reference.by_number.get(number)
            if one is not None:
                errors = {n: distance(one, self.candidate.by_number[n]) for n in self._same_size(one.size)}
                possible = [n for n in self.others if errors.get(n, np.inf) < self.limit]
                angles = {n: proportion(one, self.candidate.by_number[n]) for n in possible}
                ends = sorted(possible, key=lambda n: errors[n])[:_CLOSEST]
                ends += [*sorted(possible, key=lambda n: angles[n])[:_MORE], *possible[:_EARLIEST]]
                ends += [c for r, c, _ in self.pairs if r == number and c in possible]
                if ends:
                    yield number, list(dict.fromkeys(ends))

    def _same_size(self, size: int) -> list[int]:
        return [n for n in self.others if self.candidate.by_number[n].size == size]

    def forced(self, values: Mapping[int, np.ndarray]) -> "State":
        """The state in which the candidate goes on with these values."""
        changes = self.candidate.replay(values)
        side = self.candidate.changed(changes, values.keys())
        return State(self.reference, side, self.matches.updated(side, changes), self.least)


def _live(trace: Trace, suspect: set[int]) -> list[int]:
    return [number for operation in trace.operations for number in operation.outputs if number in suspect]


@dataclass(frozen=True, eq=False)
class _Step:
    """A value of the reference with which the candidate goes on."""

    number: int
    other: int
    value: np.ndarray
    gain: int  # values of the reference that the candidate has thereby
    closes: bool  # whether all outputs agree


_Repaired = tuple[int, _Step, Repair, dict[int, np.ndarray]]


def _closing(state: State) -> list[_Step]:
    """Steps with the first value of the reference after which all outputs agree: nothing else differs then."""
    numbers = [n for n in state.suspects[0] if n in state.reference.by_number]
    start = state.candidate.work[0]
    for number in numbers[:_CANDIDATES]:
        one = state.reference.by_number[number]
        same = [n for n in state.others if distance(one, state.candidate.by_number[n]) < state.limit]
        steps = []
        for other, value in _replacements(state, number, same[:_SAME_SIZE]):
            changes = state.candidate.replay({other: value})
            if state.closed_by(changes):
                steps.append(_step(state, number, other, value, changes))
        if steps:
            return sorted(steps, key=lambda step: -step.gain)
        if state.candidate.work[0] - start > _NUMBERS:
            break
    return []


def _gaining(state: State) -> list[_Step]:
    """Steps after which more of what follows matches."""
    steps: list[_Step] = []
    worse = 0
    for number, others in islice(state.ends(), _CANDIDATES):
        worse += 1
        highest = max((step.gain for step in steps), default=-1)
        for other, value in _replacements(state, number, others):
            step = _step(state, number, other, value, state.candidate.replay({other: value}, limit=_WINDOW))
            if step.gain or step.closes:
                steps.append(step)
                worse = 0 if step.gain > highest else worse
        if steps and worse >= _NO_BETTER:
            break
    return steps


def _in_order_of_trial(steps: Sequence[_Step]) -> list[_Step]:
    """The step that gains most, then for each end in order of execution the best and latest ones."""
    by_gain = sorted(steps, key=lambda step: (-step.gain, not step.closes))
    ordered = by_gain[:1]
    for number in sorted({step.number for step in steps}):
        variants = [step for step in by_gain if step.number == number]
        latest = sorted(variants, key=lambda step: (-step.gain, -step.other))  # more operations lead there
        ordered += [*latest[:_VARIANTS], *variants[:1]]
    return list(dict.fromkeys(ordered))


def _step(state: State, number: int, other: int, value: np.ndarray, changes: Mapping[int, np.ndarray]) -> _Step:
    matches = state.matches.updated(state.candidate.changed(changes, (other,)), changes)
    gain = len(matches.of_reference.keys() - state.matches.of_reference.keys() - {number})
    return _Step(number, other, value, gain, state.closed_by(changes))


def next_step(state: State) -> tuple[int, Defect, State] | None:
    """The step after which most of what follows matches, one that can be repaired first; None if nothing does."""
    closing = _closing(state)
    best = _repaired(state, closing)
    steps: list[_Step] = []
    if best is None or best[0] > WEAK:
        steps = _in_order_of_trial(_gaining(state))
        other = _everywhere(state, steps) or _repaired(state, steps)
        best = min((r for r in (best, other) if r is not None), key=lambda repaired: repaired[0], default=None)
    if best is None:
        steps = sorted([*closing, *steps], key=lambda step: -step.gain)
        return _finished(state, steps[0], None, {steps[0].other: steps[0].value}) if steps else None
    _, step, repair, values = best
    return _finished(state, step, repair, values)


def _everywhere(state: State, steps: Sequence[_Step]) -> _Repaired | None:
    """The parameter in another arrangement with which all outputs agree: code uses one several times, as in a loop."""
    start = state.candidate.work[0]
    for step in steps[:1]:
        regions = _regions(state, step.number, step.other)
        search = Search((state.reference, state.candidate), regions, step.value, state.bound)
        for attempt in islice((*search.parameters(), *search.exchanged()), _PARAMETERS):
            if attempt.repair.number in search.names and attempt.fits(state.candidate):
                changes = state.candidate.replay(attempt.changes)
                if state.candidate.work[0] - start > _NUMBERS:
                    return None
                if state.closed_by(changes):
                    return attempt.rank, step, attempt.repair, attempt.changes
    return None


def _repaired(state: State, steps: Sequence[_Step]) -> _Repaired | None:
    """(rank, step, repair, new values): the plainest repair up to the end of one of the first steps."""
    best: _Repaired | None = None
    budget = _BUDGET
    for step in steps[:_SEARCHED]:
        regions = _regions(state, step.number, step.other)
        search = Search((state.reference, state.candidate), regions, step.value, state.bound, min(budget, BUDGET))
        success = search.best()
        budget -= min(budget, BUDGET) - max(search.budget, 0)
        if success is not None and (best is None or success[0] < best[0]):
            best = success[0], step, *success[1:]
        if budget <= 0 or (best is not None and best[0] < WEAK):
            break
    return best


def _finished(
    state: State, step: _Step, repair: Repair | None, values: Mapping[int, np.ndarray]
) -> tuple[int, Defect, State]:
    regions = _regions(state, step.number, step.other)
    target = state.candidate.value(step.other)
    largest = np.abs(step.value[np.isfinite(step.value)]).max(initial=1e-300)
    error = float(difference(step.value, target).max() / largest)
    if repair is None and error <= ROUNDED:
        repair = _rounded_constant(state, regions)
    return step.number, Defect(regions[0].operations, regions[1].operations, error, repair), state.forced(values)


def _rounded_constant(state: State, regions: tuple[Region, Region]) -> Repair | None:
    """The reference's constant that is rounded to float32, or a constant of either side that may be."""
    one, other = regions
    for target in alignments(state.candidate.value(other.end), state.reference.value(one.end)):
        success = Search((state.candidate, state.reference), (other, one), target, state.bound).best()
        if success is not None and success[1].rounding:
            return success[1]
    for side, region, matched in zip(
        (state.reference, state.candidate),
        regions,
        (state.matches.of_reference, state.matches.of_candidate),
        strict=True,
    ):
        for number in constants(side, region):
            if number not in matched and is_float32(side.value(number)):
                return Repair(number, "a constant is rounded to float32", None, rounding=True)
    return None


def _replacements(state: State, number: int, others: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(candidate's value, the reference's value in its shape)."""
    for other in others:
        for value in alignments(state.reference.value(number), state.candidate.value(other)):
            yield other, value


def _regions(state: State, number: int, other: int) -> tuple[Region, Region]:
    reference = _region(state.reference.trace, set(state.suspects[0]), number)
    suspect = {*state.suspects[1], *state.rearranged()}
    candidate = _region(state.candidate.trace, suspect | _other_order(state, reference, suspect, other), other)
    return Region(reference, number), Region(candidate, other)


def _other_order(state: State, reference: Sequence[Operation], suspect: set[int], end: int) -> set[int]:
    """Values that enter the candidate's region in another flat order than the reference's; parameters apart."""
    trace, made = state.candidate.trace, producers(state.candidate.trace)
    entering = {n for operation in reference for n in operation.inputs}
    rearranged: set[int] = set()
    for operation in _region(trace, suspect, end):
        for number in operation.inputs:
            sources = entering.intersection(state.matches.of_candidate.get(number, ()))
            value = state.candidate.value(number)
            if sources and not any(same_order(state.reference.value(n), value, state.bound) for n in sources):
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
