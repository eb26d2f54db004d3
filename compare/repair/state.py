"""Two traces with what matches and what is suspect, and the changes that were made to the candidate so far."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.matching import (
    EXACT,
    Matches,
    Side,
    alignments,
    arranged,
    distance,
    output_pairs,
    proportion,
    same_order,
    suspects,
)
from ..matching.regions import Region, regions
from ..matching.samples import Samples
from ..matching.uses import USE
from .edits import Edits, Repair, Sides, edited
from .repairs import BUDGET, RepairSearch

_CLOSEST = 3  # closest values of the candidate tried for each
_MORE = 2  # further values that are nearest to proportional
_EARLIEST = 5  # further values of its size, in order of execution


@dataclass(frozen=True)
class Precedent:
    """A repair, and the operations of both sides up to which it was made."""

    reference: tuple[Operation, ...]
    candidate: tuple[Operation, ...]
    text: str


@dataclass(frozen=True, eq=False)
class Change:
    """What takes a difference out of the candidate: a repair, and the reference's value with which it goes on."""

    number: int  # value of the reference
    other: int  # the candidate's value that it replaces
    arrangement: int  # which of `alignments`
    repair: Repair | None
    whole: bool = False  # the value is an output, because no other difference was found

    def forced(self, sides: Sides) -> dict[int, np.ndarray]:
        """The reference's value in the place of the candidate's."""
        possible = alignments(sides[0].value(self.number), sides[1].value(self.other))
        return {self.other: possible[min(self.arrangement, len(possible) - 1)]}

    @property
    def edits(self) -> Edits:
        """The repair; the reference's value where there is none, or where it only rounds."""
        own = () if self.repair is None or self.repair.rounding else self.repair.edits
        return own or ((self.other, self.forced),)

    @property
    def is_of_the_reference(self) -> bool:
        """Whether the candidate goes on with a value of the reference, as where it lacks a step."""
        return any(getattr(edit, "__func__", None) is Change.forced for _, edit in self.edits)

    def applied(self, sides: Sides) -> Sides:
        """The values after the change."""
        candidate = sides[1] if self.repair is None else edited(sides, self.repair.edits)
        if self.repair is None or not self.repair.parameter or not self.repair.edits:
            candidate = candidate.continued(self.forced(sides))
        return sides[0], candidate


@dataclass(frozen=True, eq=False)
class Step:
    """A value of the reference with which the candidate goes on."""

    number: int
    other: int
    value: np.ndarray
    gain: int  # reference values that this step makes match
    closes: bool  # whether all outputs agree
    follows: bool = True  # more matches than what only arranges the value
    whole: bool = False  # the value is an output


@dataclass
class State:
    """Both traces, with what matches and what is suspect."""

    reference: Side
    candidate: Side
    matches: Matches
    least: float = 0.0  # outputs are compared relative to their largest number, or to this if it is larger
    precedents: tuple[Precedent, ...] = ()
    entering: tuple[tuple[int, int], ...] = ()  # equal values of both that enter repaired regions, compared as outputs
    limit: float = np.inf  # of the errors of values; small once nothing but rounding differs
    samples: Samples | None = None  # None: only the inputs themselves are tried
    taken: tuple[Change, ...] = ()  # in the order in which they were found
    open_outputs: int = field(init=False)  # outputs that differ
    rearranged_outputs: list[str] = field(init=False)
    matched: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.bound = self.matches.bound
        self.other_axes = _other_axes(self.reference.trace, self.candidate.trace)
        outputs = self.reference.trace.outputs, self.candidate.trace.outputs
        names = output_pairs(self.reference.trace, self.candidate.trace)
        pairs = self.pairs = [(outputs[0][one], outputs[1][other], other) for one, other in names]
        differing = self.differing = [(r, c) for r, c, _ in pairs if not self._equal(r, c)]
        differing += [(r, c) for r, c in self.entering if c not in self.matches.of_candidate]
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
        values = [(self.reference.value(r), self.candidate.value(c), n) for r, c, n in pairs if (r, c) not in differing]
        self.rearranged_outputs = [
            f"{name}: shape {other.shape}; the reference's is {one.shape}"
            if one.shape != other.shape
            else f"{name}: the reference's, with its axes in another order, as in the inputs"
            for one, other, name in values
            if one.shape != other.shape or not same_order(one, other, self.bound, self.least)
        ]
        self.matched = len(self.matches.of_reference), len(self.reference.by_number)

    def with_outputs(self, reference: Mapping[str, int], candidate: Mapping[str, int]) -> "State":
        """This state, in which these outputs are compared."""
        sides = self.reference.with_outputs(reference), self.candidate.with_outputs(candidate)
        others = self.precedents, self.entering, self.limit, self.samples, self.taken
        return State(*sides, self.matches, self.least, *others)

    def _others(self) -> list[int]:
        """Suspects of the candidate, and what enters them, after which a step may be missing; in order."""
        suspect = set(self.suspects[1])
        possible: list[int] = []
        for operation in self.candidate.trace.operations:
            if not suspect.isdisjoint(operation.outputs):
                possible += [*operation.inputs, *operation.outputs]
        used = {o.outputs[0]: o.inputs[0] for o in self.candidate.trace.operations if o.name == USE}
        possible += [used[n] for n in possible if n in used]
        order = {n: i for i, o in enumerate(self.candidate.trace.operations) for n in o.outputs}
        replaced = {change.other for change in self.taken}
        numbers = {n for n in possible if n in order and n in self.candidate.by_number and n not in replaced}
        return sorted(numbers, key=lambda number: order[number])

    @staticmethod
    def _common(side: Side, other: Side, matched: Mapping[int, Any]) -> set[int]:
        """The values of a side that the other has too, with those that identify nothing but in their order."""
        known = set(other.contents.values())
        return {*matched, *(number for number, content in side.contents.items() if content in known)}

    def _equal(self, reference: int, candidate: int) -> bool:
        """Equal element by element; in another arrangement only if the shapes differ, or the inputs' axes do."""
        one, other = self.reference.value(reference), self.candidate.value(candidate)
        if one.shape != other.shape and (
            candidate in self.matches.of_reference.get(reference, ())
            or (one.dtype.kind in "biu" and any(np.array_equal(each, other) for each in alignments(one, other)))
        ):
            return True
        return any(same_order(each, other, self.bound, self.least) for each in self.orders(one, other))

    def orders(self, one: np.ndarray, other: np.ndarray) -> list[np.ndarray]:
        """An output of the reference as it is, and with the order of axes that the candidate's inputs have."""
        orders = [order for order in self.other_axes if len(order) == one.ndim]
        return [one, *(a for a in map(one.transpose, orders) if a.shape == other.shape)]

    def agree(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether an output of the reference and one of the candidate count as equal."""
        if any(same_order(each, other, self.bound, self.least) for each in self.orders(one, other)):
            return True
        return one.shape != other.shape and arranged(one, other, self.bound)

    def exchanged_outputs(self) -> str:
        """The first output that is another one of the reference's; empty if there is none."""
        names = [{n: name for name, n in side.trace.outputs.items()} for side in (self.reference, self.candidate)]
        for number, _ in self.differing:
            for other in self.matches.of_reference.get(number, ()):
                if number in names[0] and other in names[1]:
                    return f"output {names[1][other]} of the candidate is the reference's output {names[0][number]}"
        return ""

    def closed_by(self, changes: Mapping[int, np.ndarray]) -> bool:
        """Whether all outputs agree after these changes to the candidate."""
        values = ((self.reference.value(r), changes.get(c)) for r, c in self.differing)
        return all(other is not None and self.agree(one, other) for one, other in values)

    def search(self, step: Step, budget: float = BUDGET) -> RepairSearch:
        """The search for a repair up to the end of a step."""
        sides, parts = (self.reference, self.candidate), self.regions(step.number, step.other)
        further = partial(self._further, step)
        return RepairSearch(sides, parts, step.value, self.bound, budget, further, self.matches.of_reference)

    def _further(self, step: Step, count: int) -> list[tuple[Sides, np.ndarray]]:
        """(values of both sides after all changes so far, the step's value) for so many other inputs."""
        change = Change(step.number, step.other, self.arrangement(step), None)
        samples = self.samples
        sides = [] if samples is None else [samples.after(self.taken, i + 1) for i in range(count)]
        return [(pair, change.forced(pair)[step.other]) for pair in sides]

    def arrangement(self, step: Step) -> int:
        """Which of the `alignments` of its two values a step has."""
        possible = alignments(self.reference.value(step.number), self.candidate.value(step.other))
        same = (i for i, array in enumerate(possible) if np.array_equal(array, step.value, equal_nan=True))
        return next(same, 0)

    def regions(self, number: int, other: int) -> tuple[Region, Region]:
        """What leads to a value of the reference, and to one of the candidate, from values that match."""
        return regions((self.reference, self.candidate), self.matches, self.suspects, (number, other))

    def ends(self) -> Iterator[tuple[int, list[int]]]:
        """(value of the reference, similar values of the candidate): where the first difference may end."""
        for number in self.suspects[0]:
            one = self.reference.by_number.get(number)
            if one is not None:
                errors = {n: distance(one, self.candidate.by_number[n]) for n in self.same_size(number)}
                possible = [n for n in self.others if errors.get(n, np.inf) < self.limit]
                angles = {n: proportion(one, self.candidate.by_number[n]) for n in possible}
                ends = sorted(possible, key=lambda n: errors[n])[:_CLOSEST]
                ends += [*sorted(possible, key=lambda n: angles[n])[:_MORE], *possible[:_EARLIEST]]
                ends += [c for r, c, _ in self.pairs if r == number and c in possible]
                if ends:
                    yield number, list(dict.fromkeys(ends))

    def same_size(self, number: int) -> list[int]:
        """Values of the candidate that may stand for one of the reference; an output only for its own counterpart."""
        size, foreign = self.reference.by_number[number].size, {c for r, c, _ in self.pairs if r != number}
        own = {c for r, c, _ in self.pairs if r == number}
        return [n for n in self.others if self.candidate.by_number[n].size == size and (n in own or n not in foreign)]

    def forced(self, values: Mapping[int, np.ndarray], step: Step, repair: Repair | None) -> "State":
        """The state in which the candidate goes on with these values, up to the end of this step."""
        changes = self.candidate.replay(values)
        side = self.candidate.changed(changes, values.keys())
        taken = (*self.taken, Change(step.number, step.other, self.arrangement(step), repair, step.whole))
        matches, others = self.matches.updated(side, changes), (self.limit, self.samples, taken)
        return State(self.reference, side, matches, self.least, self.precedents, self.entering, *others)


def _other_axes(reference: Trace, candidate: Trace) -> list[tuple[int, ...]]:
    """The orders in which inputs of the candidate have the reference's axes, such as channels last."""
    shared = reference.given.keys() & candidate.given.keys()
    pairs = [(reference.values[reference.given[n]], candidate.values[candidate.given[n]]) for n in shared]
    differing = [pair for pair in pairs if pair[0].ndim > 2 and not same_order(*pair, EXACT)]
    orders = [
        order
        for one, other in differing
        for order in permutations(range(one.ndim))
        if one.transpose(order).shape == other.shape and np.array_equal(one.transpose(order), other, equal_nan=True)
    ]
    return list(dict.fromkeys(orders))


def _live(trace: Trace, suspect: set[int]) -> list[int]:
    return [number for operation in trace.operations for number in operation.outputs if number in suspect]
