"""Finds the first values at which a candidate diverges from its reference, and repairs the trace there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, permutations, product
from typing import Any

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.matching import (
    EXACT,
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
    signature,
    suspects,
)
from ..matching.regions import Region, regions
from ..matching.samples import Samples
from ..matching.uses import USE
from .alternatives import UNARY, kind
from .defect import Defect
from .float32_constants import rounded_constant
from .folded_biases import unfolded
from .repairs import BUDGET, FLOAT32, RESIDUAL, WEAK, Edit, Edits, Repair, RepairSearch, Sides, edited

_CANDIDATES = 12  # reference values tried after the last common one
_NO_BETTER = 3  # consecutive values without improvement before the search stops
_CLOSEST = 3  # closest values of the candidate tried for each
_MORE = 2  # further values that are nearest to proportional
_EARLIEST = 5  # further values of its size, in order of execution
_SAME_SIZE = 24  # values of the candidate tried as the only one that differs
_NUMBERS = 5e8  # elements that all of these attempts compute together
_WINDOW = 60  # operations after a value in which more values match if it is right
_LATEST = 12  # last values of this window; the reference has one of them if nothing after it differs
_ENDS = 16  # ends of the same code that are tried
_PARAMETERS = 400  # changes of parameters tried in the whole trace
_VARIANTS = 2  # values of the candidate tried for one of the reference's
_SEARCHED = 8  # steps for which repairs are tried
_OF_A_NORM = 24  # most operations of one function, such as a norm
_LINES, _NAMES = 2, 4  # of the reference that are named
_ARITHMETIC = {"add", "sub", "mul", "div", "neg"}  # of these, the numbers are looked for
_ACTIVATIONS = {*UNARY, "gelu", "erf", "logistic", "leaky_relu", "hardtanh"}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "dot_general", "convolution", "conv_general_dilated", "embedding"}
_BUDGET = 3 * BUDGET  # elements that these attempts compute together


@dataclass(frozen=True)
class _Precedent:
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

    def applied(self, sides: Sides) -> Sides:
        """The values after the change."""
        candidate = sides[1] if self.repair is None else edited(sides, self.repair.edits)
        if self.repair is None or not self.repair.parameter or not self.repair.edits:
            candidate = candidate.continued(self.forced(sides))
        return sides[0], candidate


@dataclass
class State:
    """Both traces, with what matches and what is suspect."""

    reference: Side
    candidate: Side
    matches: Matches
    least: float = 0.0  # outputs are compared relative to their largest number, or to this if it is larger
    precedents: tuple[_Precedent, ...] = ()
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

    def search(self, step: "_Step", budget: float = BUDGET) -> RepairSearch:
        """The search for a repair up to the end of a step."""
        sides, parts = (self.reference, self.candidate), self.regions(step.number, step.other)
        return RepairSearch(sides, parts, step.value, self.bound, budget, partial(self._further, step))

    def _further(self, step: "_Step", count: int) -> list[tuple[Sides, np.ndarray]]:
        """(values of both sides after all changes so far, the step's value) for so many other inputs."""
        change = Change(step.number, step.other, self.arrangement(step), None)
        samples = self.samples
        sides = [] if samples is None else [samples.after(self.taken, i + 1) for i in range(count)]
        return [(pair, change.forced(pair)[step.other]) for pair in sides]

    def arrangement(self, step: "_Step") -> int:
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

    def forced(self, values: Mapping[int, np.ndarray], step: "_Step", repair: Repair | None) -> "State":
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


@dataclass(frozen=True, eq=False)
class _Step:
    """A value of the reference with which the candidate goes on."""

    number: int
    other: int
    value: np.ndarray
    gain: int  # reference values that this step makes match
    closes: bool  # whether all outputs agree
    whole: bool = False  # the value is an output


_Repaired = tuple[int, _Step, Repair, dict[int, np.ndarray]]


def _closing(state: State) -> list[_Step]:
    """Steps with the first value of the reference after which all outputs agree: nothing else differs then."""
    numbers = [n for n in state.suspects[0] if n in state.reference.by_number]
    start = state.candidate.work[0]
    for number in numbers[: 2 * _CANDIDATES]:  # a norm in primitives has a dozen values
        one = state.reference.by_number[number]
        same = [n for n in state.same_size(number) if distance(one, state.candidate.by_number[n]) < state.limit]
        steps = []
        for other, value in _replacements(state, number, same[:_SAME_SIZE]):
            if _goes_on_equal(state, other, value):
                changes = state.candidate.replay({other: value})
                if state.closed_by(changes):
                    steps.append(_step(state, number, other, value, changes))
        if steps:
            return sorted(steps, key=lambda step: -step.gain)
        if state.candidate.work[0] - start > _NUMBERS:
            break
    return []


def _goes_on_equal(state: State, other: int, value: np.ndarray) -> bool:
    """Whether the reference has one of the last values of the window after a value: the whole trace takes longer."""
    changes = state.candidate.replay({other: value}, limit=_WINDOW)
    for number in [*reversed(changes)][:_LATEST]:
        if _partners(state, changes[number]):
            return True
    return state.closed_by(changes)


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
    unfolding = _unfolded(state)
    if unfolding is not None:
        return unfolding
    repeated = _repeated(state)
    if repeated is not None:
        _, step, repair, values = repeated
        return _finished(state, step, repair, values)
    closing = _closing(state)
    best = _missing(state, closing) or _repaired(state, closing)
    steps: list[_Step] = []
    if best is None or best[0] > WEAK:
        steps = _in_order_of_trial(_gaining(state))
        other = _everywhere(state, steps) or _missing(state, steps[:1]) or _repaired(state, steps)
        best = min((r for r in (best, other) if r is not None), key=lambda repaired: repaired[0], default=None)
    if best is None:
        steps = sorted([*closing, *steps], key=lambda step: -step.gain)
        if not steps:
            return output_step(state)
        return _finished(state, steps[0], None, {steps[0].other: steps[0].value})
    _, step, repair, values = best
    return _finished(state, step, repair, values)


def _missing(state: State, steps: Sequence[_Step]) -> _Repaired | None:
    """A norm, an activation or another function that the reference applies to a value, and the candidate does not."""
    for step in steps:
        reference, _ = state.regions(step.number, step.other)
        names = list(dict.fromkeys(map(kind, reference.operations)))
        sources = state.matches.of_candidate.get(step.other, ())
        if not 0 < len(reference.operations) <= _OF_A_NORM or {*names} <= _ARITHMETIC:
            continue
        if any(name in _PRODUCTS or "backward" in name for name in names):  # whose weights or lines are wrong
            continue
        if reference.leaves and not {*sources}.isdisjoint(reference.leaves):
            # people leave out an activation where its input is computed, and a norm where its output is used
            made = producers(state.candidate.trace).get(step.other)
            use = (
                made if {*names} <= _ACTIVATIONS and made is not None else next(iter(_use_of(state, step.other)), made)
            )
            lines = " and ".join(list(dict.fromkeys(o.line or o.module for o in reference.operations))[:_LINES])
            forced = Change(step.number, step.other, state.arrangement(step), None).forced
            shown = ", ".join(names[:_NAMES]) + ", …" * (len(names) > _NAMES)
            repair = Repair(step.other, f"missing: {shown} ({lines})", use, edits=((step.other, forced),))
            return 1, step, repair, {step.other: step.value}
    return None


def _unfolded(state: State) -> tuple[int, Defect, State] | None:
    """A bias that is added in the wrong place, if more values match once it is added in the reference's."""
    if state.samples is None:
        return None
    best: tuple[tuple[bool, int], tuple[int, Defect, State]] | None = None
    before = _matched_values(state)
    sides, ends = (state.reference.plain(), state.candidate.plain()), [c for _, c, _ in state.pairs]
    for repair, users in unfolded(state.samples.traces, state.samples.weights):
        moved = edited(sides, in_order(state, repair.edits))
        errors = {n: difference(moved.value(n), state.candidate.value(n)).max(initial=0) for n in ends}
        largest = {n: np.abs(moved.value(n)).max(initial=1e-300) for n in ends}
        error = float(max(errors[n] / largest[n] for n in ends))
        if error <= ROUNDED:  # it makes no difference, but for a rounded sum
            continue
        partners = [(_partners(state, moved.value(n))[:1], n) for n, _ in repair.edits]
        if not repair.parameter and not all(equal for equal, _ in partners):
            continue
        equal, other = partners[-1]
        number, other = (equal[0], other) if equal else state.differing[0]
        step = _Step(number, other, moved.value(other), 0, False)
        after = state.forced({n: moved.value(n) for n, _ in repair.edits}, step, repair)
        gain = len(_matched_values(after) - before)
        own = () if repair.operation is None else (repair.operation,)
        rank = not after.open_outputs, gain
        if gain > 0 and (best is None or rank > best[0]):
            best = rank, (number, Defect(tuple(users), own, error, repair), after)
    return None if best is None else best[1]


def _matched_values(state: State) -> set[int]:
    """Values of the reference, other than parameters, that the candidate has."""
    return state.matches.of_reference.keys() - {*state.reference.trace.parameters.values()}


def _partners(state: State, value: np.ndarray) -> list[int]:
    """Values of the reference that are equal to this one."""
    one = signature(value)
    return [] if one is None else list(state.reference.partners(one, value, state.bound))


def output_step(state: State) -> tuple[int, Defect, State] | None:
    """The step that ends at an output that differs, with all that leads there from values that match."""
    outputs = [(r, c) for r, c, _ in state.pairs if (r, c) in state.differing]
    if not outputs or state.exchanged_outputs():
        return None
    number, other = outputs[0]
    last = state.taken[-1] if state.taken else None
    if last is not None and last.whole and (last.number, last.other) == (number, other):  # which changed nothing
        return None
    one, target = state.reference.value(number), state.candidate.value(other)
    possible = alignments(one, target) if one.shape != target.shape else state.orders(one, target)[::-1]
    if not possible:
        return None
    step = _Step(number, other, possible[0], 0, len(outputs) == 1, whole=True)
    best = _repaired(state, [step])
    return _finished(state, *((step, None, {other: step.value}) if best is None else best[1:]))


def _repeated(state: State) -> _Repaired | None:
    """The repair of an earlier difference at the next place of the same code, as in the next layer."""
    for precedent in state.precedents:
        number, other = _next_of(state, precedent)
        values = alignments(state.reference.value(number), state.candidate.value(other)) if number >= 0 else []
        for value in values:
            step = _step(state, number, other, value, state.candidate.replay({other: value}, limit=_WINDOW))
            repaired = _repaired(state, [step]) if step.gain or step.closes else None
            if repaired is not None and str(repaired[2]) == precedent.text:
                return repaired
    return None


def _next_of(state: State, precedent: _Precedent) -> tuple[int, int]:
    """The first suspects of both sides to which the same code leads; -1 if there are none."""
    ends = [
        _computed_by(side.trace, operations[-1], suspects)
        for side, operations, suspects in zip(
            (state.reference, state.candidate), (precedent.reference, precedent.candidate), state.suspects, strict=True
        )
    ]
    for number, other in islice(product(ends[0][:1], ends[1]), _ENDS):
        parts = state.regions(number, other)
        if all(
            [(o.name, o.line) for o in part.operations] == [(o.name, o.line) for o in operations]
            for part, operations in zip(parts, (precedent.reference, precedent.candidate), strict=True)
        ):
            return number, other
    return -1, -1


def _computed_by(trace: Trace, operation: Operation, suspects: Sequence[int]) -> list[int]:
    """The suspects that the same code computes, in order."""
    suspect, code = set(suspects), (operation.name, operation.line)
    return [n for o in trace.operations if (o.name, o.line) == code for n in o.outputs if n in suspect]


def _everywhere(state: State, steps: Sequence[_Step]) -> _Repaired | None:
    """One change of parameters after which all outputs agree: a parameter used repeatedly, or two that are swapped."""
    start = state.candidate.work[0]
    for step in steps[:1]:
        search = state.search(step)
        matched, used = state.matches.of_candidate, state.matches.of_reference
        further = search.exchanged_further(), search.parameters_further(matched, used)
        sources = chain(search.transposed(), search.parameters(), search.exchanged(), *further)
        for attempt in islice(sources, _PARAMETERS):
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
        search = state.search(step, min(budget, BUDGET))
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
    parts = state.regions(step.number, step.other)
    target = state.candidate.value(step.other)
    largest = [float(np.abs(a[np.isfinite(a)]).astype(np.float64).max(initial=0)) for a in (step.value, target)]
    error = float(difference(step.value, target).max() / (largest[0] or largest[1] or 1.0))
    unexplained = error <= ROUNDED if repair is None else error <= FLOAT32 and not (repair.literal or repair.parameter)
    if unexplained:
        repair = rounded_constant((state.reference, state.candidate), parts, state.matches) or repair
    if repair is not None and repair.text == RESIDUAL and (use := _use_of(state, repair.number)):
        repair = replace(repair, operation=use[0])  # people leave out a residual where it is used
    if repair is None or not repair.parameter:  # a repair's value may inherit what is left of other differences
        values = {**values, step.other: step.value}
    after = state.forced(values, step, repair)
    for number in parts[1].leaves if not step.whole else ():  # else nothing follows that could tell
        if number in values:  # it was equal to a parameter that it should not be equal to
            continue
        sources = state.matches.of_candidate.get(number, ())
        common = [source for source in sources if source in parts[0].leaves] or sources
        after.entering += tuple((source, number) for source in common[:1])
    if repair is not None and not repair.parameter and parts[0].operations and parts[1].operations:
        precedent = _Precedent(parts[0].operations, parts[1].operations, str(repair))
        after.precedents = (*after.precedents, precedent)
    own = parts[1].operations
    if repair is None and not {*state.matches.of_candidate.get(step.other, ())}.isdisjoint(parts[0].leaves):
        own = _use_of(state, step.other) or own
    own = tuple(operation for operation in own if operation.name != USE) or own
    return step.number, Defect(parts[0].operations, own, error, repair), after


def _use_of(state: State, number: int) -> tuple[Operation, ...]:
    """The use of a value that the reference has too, before which a step is missing; none if the value differs.

    Several uses have the line within which all of them are, unless the value is computed there too.
    """
    if number not in state.matches.of_candidate:
        return ()
    trace, suspect = state.candidate.trace, set(state.suspects[1])
    made = producers(trace).get(number)
    if made is not None and made.name == USE:
        return (made,)
    passed_on = {o.outputs[0] for o in trace.operations if o.name == USE and number in o.inputs}
    users = [
        o
        for o in trace.operations
        if (number in o.inputs and not suspect.isdisjoint(o.outputs)) or not passed_on.isdisjoint(o.outputs)
    ]
    if not users:
        return ()
    outer = () if made is None else made.lines
    own = ((i, line) for i, line in enumerate(users[0].lines) if line not in outer)
    shared = [i for i, line in own if all(line in user.lines for user in users)]
    lines = users[0].lines[shared[0] if shared else 0 :]
    return (Operation(USE, (number,), (), users[0].module, lines),)


def _replacements(state: State, number: int, others: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(candidate's value, the reference's value in its shape)."""
    for other in others:
        for value in alignments(state.reference.value(number), state.candidate.value(other)):
            yield other, value


def in_order(state: State, edits: Sequence[tuple[int, Edit]]) -> Edits:
    """Edits of the candidate in the order of execution."""
    order = {n: i for i, o in enumerate(state.candidate.trace.operations) for n in o.outputs}
    return tuple(sorted(edits, key=lambda edit: order.get(edit[0], -1)))


def outputs_agree(state: State, samples: Samples, count: int) -> bool:
    """Whether all outputs agree after the repairs alone, computed from the inputs on, for so many inputs."""
    edits = in_order(state, [edit for change in state.taken for edit in change.edits])
    for sample in range(count):
        reference, candidate = samples.after((), sample)
        candidate = edited((reference, candidate), edits)
        if not all(state.agree(reference.value(r), candidate.value(c)) for r, c, _ in state.pairs):
            return False
    return True
