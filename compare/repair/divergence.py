"""Finds the first values at which a candidate diverges from its reference, and repairs the trace there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, product

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.matching import (
    ROUNDED,
    alignments,
    difference,
    distance,
    signature,
)
from ..matching.samples import Samples
from ..matching.uses import USE
from .alternatives import UNARY, kind
from .defect import Defect
from .edits import FLOAT32, Edit, Edits, Repair, edited
from .float32_constants import rounded_constant, unrounded_constant
from .folded_biases import unfolded
from .places import code_of_missing, place_of_call, place_of_missing, place_of_operand, use_of
from .repairs import AT_ITS_USE, BUDGET, MISSING, PRODUCTS, WEAK
from .state import Change, Precedent, State, Step
from .tables import in_tables
from .unmasked import unmasked
from .unpacked import unpacked

_CANDIDATES = 24  # reference values tried after the last common one
_NO_BETTER = 3  # consecutive values without improvement before the search stops
_ENOUGH = 8  # values that match after a step, from which on the search may stop: fewer match by coincidence
_SAME_SIZE = 24  # values of the candidate tried as the only one that differs
_NUMBERS = 5e8  # elements that all of these attempts compute together
_WINDOW = 60  # operations after a value in which more values match if it is right
_NEXT = 20  # operations after a value of which the reference has one if it is right and nothing else differs
_LATEST = 12  # last values of this window; the reference has one of them if nothing after it differs
_ENDS = 16  # ends of the same code that are tried
_PARAMETERS = 400  # changes of parameters tried in the whole trace
_VARIANTS = 2  # values of the candidate tried for one of the reference's
_SHARE = 4  # a weak repair counts where this times what matches after it is no less than elsewhere
_SEARCHED = 8  # steps for which repairs are tried
_OF_A_NORM = 24  # most operations of one function, such as a norm
_LINES, _NAMES = 2, 4  # of the reference that are named
_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "pow"}  # of these, the numbers are looked for
_ACTIVATIONS = {*UNARY, "gelu", "erf", "logistic", "leaky_relu", "hardtanh"}
_BUDGET = 3 * BUDGET  # elements that these attempts compute together
_Repaired = tuple[int, Step, Repair, dict[int, np.ndarray]]


def _closing(state: State) -> list[Step]:
    """Steps with the first value of the reference after which all outputs agree: nothing else differs then."""
    numbers = [n for n in state.suspects[0] if n in state.reference.by_number]
    start = state.candidate.work[0]
    for number in numbers[:_CANDIDATES]:  # a norm in primitives has a dozen values
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
        if state.candidate.work[0] - start > _NUMBERS or state.candidate.deadline.is_over:
            break
    return []


def _goes_on_equal(state: State, other: int, value: np.ndarray) -> bool:
    """Whether the reference has one of the last values of the window after a value: the whole trace takes longer."""
    own = {*_alike(state, value)}  # which a value that only arranges this one has too
    changes = state.candidate.replay({other: value}, limit=_NEXT)
    if not any({*_alike(state, v)} - own for v in changes.values()):
        return state.closed_by(changes)
    changes = state.candidate.replay({other: value}, limit=_WINDOW)
    if any(True for number in [*reversed(changes)][:_LATEST] for _ in _alike(state, changes[number])):
        return True
    return state.closed_by(changes)


def _gaining(state: State) -> list[Step]:
    """Steps after which more of what follows matches."""
    steps: list[Step] = []
    worse = 0
    for number, others in islice(state.ends(), _CANDIDATES):
        worse += 1
        highest = max((step.gain for step in steps), default=-1)
        for other, value in _replacements(state, number, others):
            step = _step(state, number, other, value, state.candidate.replay({other: value}, limit=_WINDOW))
            if step.gain or step.closes:
                steps.append(step)
                worse = 0 if step.gain > highest else worse
        if (highest >= _ENOUGH and worse >= _NO_BETTER) or state.candidate.deadline.is_over:
            break
    return steps


def _in_order_of_trial(state: State, steps: Sequence[Step]) -> list[Step]:
    """The step that gains most, then for each end in order of execution the best and latest ones.

    Of several that gain most, the one whose values are computed from the same ones: the arrangements of a table match
    wherever the table stands.
    """
    by_gain = sorted(steps, key=lambda step: (-step.gain, not step.closes))
    highest = [step for step in by_gain if (step.gain, step.closes) == (by_gain[0].gain, by_gain[0].closes)]
    ordered = [min(highest, key=partial(_sources_of_one, state))] if len(highest) > 1 else highest
    for number in sorted({step.number for step in steps}):
        variants = [step for step in by_gain if step.number == number]
        latest = sorted(variants, key=lambda step: (-step.gain, -step.other))  # more operations lead there
        ordered += [*latest[:_VARIANTS], *variants[:1]]
    return list(dict.fromkeys(ordered))


def _sources_of_one(state: State, step: Step) -> int:
    """How many values only one side's region uses."""
    reference, candidate = state.regions(step.number, step.other)
    own = {state.matches.of_candidate.get(number, ()) for number in candidate.leaves}
    common = [not {*reference.leaves}.isdisjoint(numbers) for numbers in own]
    return common.count(False) + len({*reference.leaves} - {*chain.from_iterable(own)})


def _step(state: State, number: int, other: int, value: np.ndarray, changes: Mapping[int, np.ndarray]) -> Step:
    matches = state.matches.updated(state.candidate.changed(changes, (other,)), changes)
    gained = matches.of_reference.keys() - state.matches.of_reference.keys() - {number}
    closes = state.closed_by(changes)
    follows = closes or not gained <= {*_partners(state, value)}
    return Step(number, other, value, len(gained), closes, follows)


def next_step(state: State) -> tuple[int, Defect, State] | None:
    """The step after which most of what follows matches, one that can be repaired first; None if nothing does."""
    unfolding = _unfolded(state)
    if unfolding is not None:
        return unfolding
    repeated = _repeated(state)
    if repeated is not None:
        _, step, repair, values = repeated
        return _finished(state, step, repair, values)
    derivative = _derivative(state)
    if derivative is not None:
        number, defect, after = _finished(state, derivative, None, {derivative.other: derivative.value})
        return number, replace(defect, follows=True), after
    found = unmasked(state) or (unpacked(state) if state.limit > ROUNDED else None)
    if found is not None:
        return _finished(state, *found)
    # After a first difference there are often more: then it is not worth looking first whether nothing else differs.
    gaining = _in_order_of_trial(state, _gaining(state)) if state.taken and state.limit > ROUNDED else []
    plain = _repaired(state, [step for step in gaining if step.gain >= _ENOUGH])
    if plain is not None and plain[0] < WEAK and len(plain[2].edits) == 1:  # several may be of several differences
        _, step, repair, values = plain
        return _finished(state, step, repair, values)
    closing = _closing(state)
    rounding = _unrounded(state, closing[0]) if closing and state.limit <= ROUNDED else None
    if rounding is not None:
        return _finished(state, closing[0], rounding, {closing[0].other: closing[0].value})
    best = _missing(state, closing) or _repaired(state, closing)
    steps: list[Step] = []
    is_weak = best is None or best[0] > WEAK or (best[0] == WEAK and best[2].text.startswith(MISSING))
    if is_weak and state.limit > ROUNDED:
        of_positions = in_tables(state)
        if of_positions is not None:
            return of_positions
    if best is None or best[0] > WEAK:
        steps = gaining or _in_order_of_trial(state, _gaining(state))
        likely = [step for step in steps if step.gain == steps[0].gain]  # one of them may lead over two differences
        other = _everywhere(state, steps) or _missing(state, likely) or _repaired(state, steps)
        best = min((r for r in (best, other) if r is not None), key=lambda repaired: repaired[0], default=None)
    if best is None:
        steps = sorted([*closing, *steps], key=lambda step: -step.gain)
        if not steps or steps[0].gain < _ENOUGH:
            whole = output_step(state)
            if not steps or (whole is not None and whole[1].repair is not None):
                return whole
        return _finished(state, steps[0], None, {steps[0].other: steps[0].value})
    _, step, repair, values = best
    return _finished(state, step, repair, values)


def _derivative(state: State) -> Step | None:
    """The step up to a derivative that differs because a line that is repaired does; its code needs no change."""
    trace, repairs = state.candidate.trace, [change.repair for change in state.taken if change.repair is not None]
    repaired = [repair.operation for repair in repairs if repair.operation is not None]
    lines = {o.line for o in repaired if trace.derived.isdisjoint(o.outputs)} - {""}
    derived = {id(o) for o in trace.operations if o.line in lines and not trace.derived.isdisjoint(o.outputs)}
    for step in _in_order_of_trial(state, _gaining(state))[:_VARIANTS] if derived and not trace.gradients else ():
        operations = state.regions(step.number, step.other)[1].operations
        if step.other in trace.derived and any(id(operation) in derived for operation in operations):
            return step
    return None


def _unrounded(state: State, step: Step) -> Repair | None:
    """The float32 constant of either side without which a step's values are equal."""
    reference, candidate = state.regions(step.number, step.other)
    own = state.search(step).rounding()
    sides = state.reference, state.candidate
    return own or unrounded_constant(sides, (reference, candidate), state.bound)


def _missing(state: State, steps: Sequence[Step]) -> _Repaired | None:
    """A norm, an activation or another function that the reference applies to a value, and the candidate does not."""
    for step in steps:
        reference, _ = state.regions(step.number, step.other)
        names = list(dict.fromkeys(map(kind, reference.operations)))
        sources = state.matches.of_candidate.get(step.other, ())
        if not 0 < len(reference.operations) <= _OF_A_NORM or {*names} <= _ARITHMETIC:
            continue
        if any(name in PRODUCTS or "backward" in name for name in names):  # whose weights or lines are wrong
            continue
        if step.follows and reference.leaves and not {*sources}.isdisjoint(reference.leaves):
            is_activation = {*names} <= _ACTIVATIONS | _ARITHMETIC and not _ACTIVATIONS.isdisjoint(names)
            use = place_of_missing(state, step.other, reference, is_activation)
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
        step = Step(number, other, moved.value(other), 0, closes=False)
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


def _alike(state: State, value: np.ndarray) -> Iterator[int]:
    """Values of the reference that have as large numbers as this one: a sign that they are equal, in little time."""
    one = signature(value)
    return iter(()) if one is None else state.reference.alike(one, state.bound)


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
    step = Step(number, other, possible[0], 0, closes=len(outputs) == 1, whole=True)
    best = _repaired(state, [step])
    return _finished(state, *((step, None, {other: step.value}) if best is None else best[1:]))


def _repeated(state: State) -> _Repaired | None:
    """The repair of an earlier difference at the next place of the same code, as in the next layer."""
    for precedent in state.precedents:
        number, other = _next_of(state, precedent)
        values = alignments(state.reference.value(number), state.candidate.value(other)) if number >= 0 else []
        for value in values:
            step = _step(state, number, other, value, state.candidate.replay({other: value}, limit=_WINDOW))
            success = state.search(step).again(precedent.text) if step.gain or step.closes else None
            if success is not None:
                return success[0], step, *success[1:]
    return None


def _next_of(state: State, precedent: Precedent) -> tuple[int, int]:
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


def _everywhere(state: State, steps: Sequence[Step]) -> _Repaired | None:
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
                if state.candidate.work[0] - start > _NUMBERS or state.candidate.deadline.is_over:
                    return None
                if state.closed_by(changes):
                    return attempt.rank, step, attempt.repair, attempt.changes
    return None


def _repaired(state: State, steps: Sequence[Step]) -> _Repaired | None:
    """(rank, step, repair, new values): the plainest repair up to the end of one of the first steps."""
    best: _Repaired | None = None
    budget, highest = _BUDGET, max((step.gain for step in steps), default=0)
    texts = dict.fromkeys(precedent.text for precedent in state.precedents)
    for step in steps[:_SEARCHED]:
        success = None
        for text in (*texts, ""):
            search, given = state.search(step, min(budget, BUDGET)), min(budget, BUDGET)
            success = search.again(text) if text else search.best()
            budget -= given - max(search.budget, 0)
            if success is not None or budget <= 0:
                break
        is_enough = success is not None and (success[0] <= WEAK or step.gain * _SHARE >= highest)
        if success is not None and is_enough and (best is None or success[0] < best[0]):
            best = success[0], step, *success[1:]
        if budget <= 0 or (best is not None and best[0] < WEAK) or state.candidate.deadline.is_over:
            break
    return best


def _finished(
    state: State, step: Step, repair: Repair | None, values: Mapping[int, np.ndarray]
) -> tuple[int, Defect, State]:
    parts = state.regions(step.number, step.other)
    target = state.candidate.value(step.other)
    largest = [float(np.abs(a[np.isfinite(a)]).astype(np.float64).max(initial=0)) for a in (step.value, target)]
    error = float(difference(step.value, target).max() / (largest[0] or largest[1] or 1.0))
    unexplained = error <= ROUNDED if repair is None else error <= FLOAT32 and not (repair.literal or repair.parameter)
    if unexplained:
        repair = rounded_constant((state.reference, state.candidate), parts, state.matches) or repair
    if repair is not None and repair.text in AT_ITS_USE:
        repair = replace(repair, operation=place_of_operand(state, repair, parts[0]))
    elif repair is not None and repair.text.startswith(MISSING) and code_of_missing(state, parts[0]) is not None:
        repair = replace(repair, operation=place_of_missing(state, repair.number, parts[0]))
    elif repair is not None and repair.operation is not None and repair.operation.lines[1:] and not repair.parameter:
        repair = replace(repair, operation=place_of_call(state, repair.operation))
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
        precedent = Precedent(parts[0].operations, parts[1].operations, str(repair))
        after.precedents = (*after.precedents, precedent)
    own = parts[1].operations
    if repair is None and not {*state.matches.of_candidate.get(step.other, ())}.isdisjoint(parts[0].leaves):
        own = use_of(state, step.other) or own
    own = tuple(operation for operation in own if operation.name != USE) or own
    return step.number, Defect(parts[0].operations, own, error, repair), after


def _replacements(state: State, number: int, others: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(candidate's value, the reference's value in its shape); True and False are not in the place of other numbers."""
    source = state.reference.value(number)
    is_mask = bool(((source == 0) | (source == 1)).all())
    for other in others:
        target = state.candidate.value(other)
        for value in alignments(source, target) if is_mask or target.dtype != bool else ():
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
