"""Finds the change to a candidate that makes it equal to its reference: each attempt is computed on the trace."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, product

import numpy as np
from scipy import special

from ..capture.trace import Operation
from ..matching.arrangements import real_numbers
from ..matching.matching import EXACT, FAILURES, Side, Values, alignments, producers, same_order
from ..matching.regions import ARRANGING, SELECTIONS, Region, Scalar, constants, extended, scalars
from ..matching.uses import USE
from .alternatives import COMPARING, UNARY, alternatives, arrangements, kind
from .edits import (
    FLOAT32,
    Edits,
    Operand,
    Repair,
    Sides,
    arranged_as,
    arrangement,
    averaged,
    computed_otherwise,
    edited,
    exchange,
    fits_mask,
    from_reference,
    function_of,
    inserted,
    insertion,
    literal,
    literals,
    mask_of,
    masked,
    scaled,
    transpose,
    with_computed_number,
)
from .exchanged_modules import exchanged_modules
from .packed_sequences import within_lengths
from .rotations import paired_otherwise

Array = np.ndarray
BUDGET = 2e8  # elements that all attempts for one region compute together
WEAK = 3  # from this rank on, another place may have a simpler repair
_FACTOR = 4  # rank of a factor that is in neither code
PASSING = (USE, "copy", "convert_element_type", "stop_gradient", "aten.clone", "aten.detach", "aten._to_copy")
_COMPUTED = 5  # rank of a step with a value that only the reference computes
_POWERS = ((1.0, ""), (0.5, " ** 0.5"))  # powers of an axis's size by which code multiplies or divides
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "dot_general", "convolution", "conv_general_dilated", "embedding"}
_VALUE = "a value of the reference"
MISSING = "missing: "
RESIDUALS = tuple(f"{MISSING}{symbol} {_VALUE}" for symbol in "+-*/")
FACTORS = RESIDUALS[2:]
AT_ITS_USE = (f"{MISSING}negative", *RESIDUALS)  # named at the use of a value
_LAST = 10  # rank after all others
_LINES = 3  # of code that may stand in one function's place
_SOFTMAX = ("div", "exp", "sub")  # its operations, from the last
_STEEP = 1e100  # slopes from which on nothing is solved
_STEPS = 12  # steps of the search for a number in the code
_LITERALS = 4  # most numbers of a line that are solved for together
_FEW = 64  # numbers, from which on one other input excludes a coincidence
_DIFFERENT = 8  # numbers, from which on they are equal by no coincidence, though no other input changes them
_OTHERS = 4  # other inputs where there are fewer
_OPERANDS = 24  # most operations of the reference whose values are tried as operands
_NEAR = 3  # most operations between a parameter and the value that it projects to

Further = Callable[[int], list[tuple[Sides, Array]]]  # so many other inputs: values of both sides, and the target


@dataclass(frozen=True)
class _Attempt:
    rank: int  # of several that succeed, the lowest is taken
    repair: Repair
    value: Array
    others: Mapping[int, Array] = field(default_factory=dict)  # values that change with it
    is_structural: bool = False  # no number in the code changes, so that a rounded constant may remain

    @property
    def changes(self) -> dict[int, Array]:
        """All values that change."""
        return {self.repair.number: self.value, **self.others}

    def fits(self, side: Side) -> bool:
        """Whether the new value has the old one's shape, and is another."""
        old = side.value(self.repair.number)
        return self.value.shape == old.shape and not np.array_equal(self.value, old)


class RepairSearch:
    """Attempts to repair the candidate's region; `target` is the reference's value in the shape of its end."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        regions: tuple[Region, Region],
        target: Array,
        bound: float,
        budget: float = BUDGET,
        further: Further = lambda count: [],
        partners: Mapping[int, Sequence[int]] | None = None,
    ):
        self.sides, self.regions, self.target, self.bound = sides, regions, target, bound
        self.further = further
        self.partners = partners or {}  # of values of the reference, those of the candidate that are equal
        self.side = sides[1]
        self.region = extended(self.side, regions[1])
        inside = set(map(id, regions[1].operations))
        others = [operation for operation in self.region.operations if id(operation) not in inside]
        made = self.made = producers(self.side.trace)
        # a value that is used in another's place is right in itself
        used = [made[o.inputs[0]] for o in self.region.operations if o.name == USE and o.inputs[0] in made]
        self.tried = (*regions[1].operations, *others, *(o for o in used if id(o) not in inside))
        self.budget = budget
        self._failed: set[int] = set()  # hashes of changes after which the end differs
        self.text = ""  # of the only repair that is tried; empty: any
        self.below = 2 * _LAST  # the rank of the best attempt so far
        self.names = {number: name for name, number in self.side.trace.parameters.items()}
        self.is_discrete = target.dtype.kind in "biu"  # then numbers cannot be solved for, and many changes fit

    def best(self) -> tuple[int, Repair, dict[int, Array]] | None:
        """(rank, repair, new values) of the plainest change that makes the end equal; None if no attempt does."""
        return self._best(
            *((2, self._explanations), (1, self._same_code), (2, self._orders), (0, self._operations)),
            *(
                (1, self._modules),
                (1, self.parameters),
                (1, self.exchanged),
                (2, self._exchanged_entries),
            ),
            *(
                (1, self._scalars),
                (2, self._literals_of_lines),
                (2, self._pools),
                (2, self._masks),
                (1, self._softmaxes),
            ),
            (3, self._insertions),
        )

    def again(self, text: str) -> tuple[int, Repair, dict[int, Array]] | None:
        """The repair of another place with this text, if it is one here too."""
        self.text = text
        return self._best((3, self._insertions)) if text.startswith(MISSING) else self.best()

    def rounding(self) -> Repair | None:
        """The change of a constant that was rounded to float32, if one makes the end equal."""
        success = self._best((1, self._scalars))
        return success[1] if success is not None and success[1].rounding else None

    def _best(
        self, *sources: tuple[int, Callable[[], Iterator[_Attempt]]]
    ) -> tuple[int, Repair, dict[int, Array]] | None:
        """The plainest of the attempts of several sources, each with the lowest rank that it has."""
        best: _Attempt | None = None
        for least, attempts in sources:
            if self.below <= least or (self.is_discrete and attempts == self._insertions):
                continue
            for attempt in attempts():
                if self.text and str(attempt.repair) != self.text:
                    continue
                judged = self._judged(attempt) if attempt.rank < self.below else None
                if judged is not None and judged.rank < self.below:
                    best, self.below = judged, judged.rank
                if self.budget < 0 or self.side.deadline.is_over:
                    break
        return None if best is None else (best.rank, best.repair, best.changes)

    def _end(self, changes: Mapping[int, Array]) -> Array | None:
        """The region's end after changes; None if it no longer has its shape."""
        before = self.side.work[0]
        with np.errstate(all="ignore"):
            values = self.side.replay(changes, self.region.operations)
        self.budget -= self.side.work[0] - before
        end = values.get(self.region.end, self.side.value(self.region.end))
        return end if end.shape == self.target.shape else None

    def _judged(self, attempt: _Attempt) -> _Attempt | None:
        """An attempt that succeeds; one that leaves a rounded constant's difference comes after all others."""
        if attempt.value.shape != self.side.value(attempt.repair.number).shape:
            return None
        if attempt.repair.operation is not None:  # which was computed for the attempt
            self.budget -= sum(self.side.value(number).size for number in attempt.repair.operation.inputs)
        contents = hash(tuple((number, value.shape, value.tobytes()) for number, value in attempt.changes.items()))
        if contents in self._failed:  # several attempts lead to the same values
            return None
        end = self._end(attempt.changes)
        if end is None or not same_order(self.target, end, self.bound):
            self._failed.add(contents)
            return None
        if not self._holds(attempt.repair.edits):
            return None
        exact = attempt.is_structural or same_order(self.target, end, EXACT)
        return attempt if exact else replace(attempt, rank=attempt.rank + _LAST)

    def _holds(self, edits: Edits) -> bool:
        """Whether edits make the end equal for other inputs too: few numbers are equal by coincidence."""
        ends = list(self._ends_after(edits)) if edits else []
        is_count = len(np.unique(self.target)) < _DIFFERENT
        if ends and is_count and all(same_order(self.target, target, EXACT) for _, target in ends):
            return False  # such as a count, which other inputs of this kind do not change
        return all(end is not None and same_order(target, end, self.bound) for end, target in ends)

    def _ends_after(self, edits: Edits) -> Iterator[tuple[Array | None, Array]]:
        """(end after edits, target) for other inputs; None if it cannot be computed, or has another shape."""
        for sides, target in self.further(_OTHERS if self.target.size < _FEW else 1):
            values = self._edited(sides, edits)
            end = None if values is None else values.value(self.region.end)
            yield (end if end is not None and end.shape == target.shape else None), target

    def _edited(self, sides: Sides, edits: Edits) -> Values | None:
        """The region's values after edits; None if they cannot be computed."""
        before = sides[1].work[0]
        try:
            with np.errstate(all="ignore"):
                return edited(sides, edits, self.region.operations)
        except FAILURES:
            return None
        finally:
            self.budget -= sides[1].work[0] - before

    def _operations(self) -> Iterator[_Attempt]:
        """Each operation, computed otherwise."""
        for operation in self.tried:
            if operation.compute is not None and len(operation.outputs) == 1:
                inputs = [self.side.value(number) for number in operation.inputs]
                (number,) = operation.outputs
                for alternative in alternatives(operation, inputs, self.side.value(number), self.below):
                    name = kind(operation)
                    if self.is_discrete and alternative.text.startswith(f"{name} → ") and name not in COMPARING:
                        continue
                    edits = ((number, partial(computed_otherwise, operation, alternative.text)),)
                    named = self._mask_of_text(operation, alternative.text)
                    repair = Repair(number, alternative.text, named, edits=edits)
                    yield _Attempt(alternative.rank, repair, alternative.value, is_structural=not alternative.rank)

    def _mask_of_text(self, operation: Operation, text: str) -> Operation:
        """The operation that makes the mask which an alternative rearranges; else the operation itself."""
        made = self.made
        for i, number in enumerate(operation.inputs):
            if f": input {i + 1} " in text and self.side.value(number).dtype == bool:
                while number in made and made[number].name in (*PASSING, *ARRANGING) and made[number].inputs:
                    number = made[number].inputs[0]
                return made.get(number, operation)
        return operation

    def _modules(self) -> Iterator[_Attempt]:
        """All parameters of one of the candidate's modules instead of another's."""
        for repair in exchanged_modules(self.side, self.region):
            ((number, edit),) = repair.edits
            yield _Attempt(1, repair, edit(self.sides)[number])

    def parameters(self) -> Iterator[_Attempt]:
        """One of the reference's parameters instead of the candidate's, or the candidate's in another order."""
        sources = dict(self._sources())
        for number in constants(self.side, self.region):
            value, name, user = self.side.value(number), self.names.get(number, ""), self._user(number)
            for source, origin in sources.items():
                array = self.sides[0].value(origin)
                for place, other in enumerate(arranged_as(array, value)):
                    text = f"should have the values of {source}"
                    if self._same_numbers(array, value):
                        transposed = value.ndim == 2 and np.array_equal(other, value.T)
                        order = "transposed" if transposed else "in another order"
                        text = f"has the values of {source}, {order}"
                    edit = partial(from_reference, origin, number, place, 0.0, False)
                    yield _Attempt(1, Repair(number, text, user, name, edits=((number, edit),)), other)
                    for shift in (-1, 1) if np.array_equal(other, value) else ():
                        text = f"is {source}, and not {source} {'+' if shift > 0 else '-'} 1"
                        edit = partial(from_reference, origin, number, place, shift, False)
                        yield _Attempt(1, Repair(number, text, user, name, edits=((number, edit),)), other + shift)
            for other, text in arrangements(value):
                edits = ((number, partial(arrangement, number, text)),)
                yield _Attempt(1, Repair(number, text, user, name or "a constant", edits=edits), other)

    def _sources(self) -> Iterator[tuple[str, int]]:
        """The reference's parameters that enter its region, as they are or after steps with one input, as a slice."""
        names = {number: name for name, number in self.sides[0].trace.parameters.items()}
        made = producers(self.sides[0].trace)
        for number in self.regions[0].leaves:
            while number in made and len(made[number].inputs) == 1 and number not in names:
                (number,) = made[number].inputs
            if number in names:
                yield names[number], number

    def parameters_further(self, matched: Container[int], used: Container[int]) -> Iterator[_Attempt]:
        """Parameters that the reference does not have as such, as one of its or a block; sums with one that is unused.

        `matched`: values of the candidate that the reference has; `used`: values of the reference that it has.
        """
        parameters = self.sides[0].trace.parameters
        sources = {name: self.sides[0].value(n) for name, n in parameters.items()}
        unused = {name: array for name, array in sources.items() if parameters[name] not in used}
        users = self._users()
        for number, name in self.names.items():
            value = self.side.value(number)
            if number not in users:
                continue
            for source, array in (unused if number in matched else sources).items():
                added = number in matched
                fits = not added or array.size == value.size
                for place, other in enumerate(arranged_as(array, value) if fits else ()):
                    text = f"lacks + {source}" if added else f"should have the values of {source}"
                    edits = ((number, partial(from_reference, parameters[source], number, place, 0.0, added)),)
                    repair = Repair(number, text, users[number], name, edits=edits)
                    yield _Attempt(1, repair, value + other if added else other)

    def exchanged(self) -> Iterator[_Attempt]:
        """Two of the candidate's parameters of one shape, each in the other's place."""
        own = [n for n in constants(self.side, self.region) if n in self.names]
        for one, other in combinations(own, 2):
            if self.side.value(one).shape == self.side.value(other).shape:
                yield self._exchange(1, (one, other), (self.names[one], self.names[other]), self._user(one))

    def _exchanged_entries(self) -> Iterator[_Attempt]:
        """Two values that enter the region, each in the other's place, as if their parameters were exchanged."""
        made = self.made
        entries = [n for n in self.region.leaves if n in made and self.side.value(n).dtype.kind == "f"]
        for one, other in combinations(entries, 2):
            names = self._parameter_of(one, made), self._parameter_of(other, made)
            if self.side.value(one).shape == self.side.value(other).shape and all(names):
                yield self._exchange(2, (one, other), names, made[one])

    def _exchange(
        self, rank: int, numbers: tuple[int, int], names: tuple[str, str], operation: Operation | None
    ) -> _Attempt:
        one, other = numbers
        edits = ((max(numbers), partial(exchange, one, other)),)
        repair = Repair(one, f"and {names[1]} are swapped", operation, names[0], edits=edits)
        return _Attempt(rank, repair, self.side.value(other), {other: self.side.value(one)})

    def _parameter_of(self, number: int, made: Mapping[int, Operation]) -> str:
        """The nearest parameter from which a value is computed, such as a projection's; empty if none is near."""
        numbers = [number]
        for _ in range(_NEAR):
            numbers = [n for before in numbers if before in made for n in made[before].inputs]
            for name in (self.names[n] for n in numbers if n in self.names):
                return name
        return ""

    def exchanged_further(self) -> Iterator[_Attempt]:
        """One of the region's parameters and another of the candidate's, each in the other's place."""
        own = [n for n in constants(self.side, self.region) if n in self.names]
        for one, other in ((one, other) for one in own for other in self.names if other not in own):
            if self.side.value(one).shape == self.side.value(other).shape:
                yield self._exchange(1, (one, other), (self.names[one], self.names[other]), self._user(one))

    def transposed(self) -> Iterator[_Attempt]:
        """All square matrices transposed: a converter that compares shapes leaves out these alone."""
        users = self._users()
        values = {n: self.side.value(n) for n in users if n in self.names}
        squares = {n: v.T for n, v in values.items() if v.ndim == 2 and v.shape[0] == v.shape[1] > 1}
        if len(squares) > 1:
            first = next(n for operation in self.side.trace.operations for n in operation.inputs if n in squares)
            text = f"and {len(squares) - 1} other square matrices are not transposed"
            edits = ((first, partial(transpose, list(squares))),)
            repair = Repair(first, text, users[first], self.names[first], edits=edits)
            yield _Attempt(1, repair, squares[first], {n: v for n, v in squares.items() if n != first})

    def _users(self) -> dict[int, Operation]:
        """The first operation that uses each value."""
        return {n: operation for operation in reversed(self.side.trace.operations) for n in operation.inputs}

    def _user(self, number: int) -> Operation | None:
        return next((operation for operation in self.region.operations if number in operation.inputs), None)

    def _same_numbers(self, one: Array, other: Array) -> bool:
        return same_order(np.sort(one, axis=None), np.sort(other, axis=None), self.bound)

    def _scalars(self) -> Iterator[_Attempt]:
        """Numbers in the code: first those that the reference has, then the one that solves the equation."""
        known = {scalar.value for scalar in scalars(self.sides[0], self.regions[0])}
        computed = {}
        for number in (n for operation in self.regions[0].operations for n in (*operation.inputs, *operation.outputs)):
            value = self.sides[0].value(number)
            if value.size == 1 and value.dtype.kind in "fiu" and np.isfinite(value).all():
                computed.setdefault(float(value.reshape(())), number)
        for scalar in scalars(self.side, self.region):
            for value, number in computed.items():
                if value not in known and not _rounds_to(value, scalar.value):
                    text = f"{kind(scalar.operation)}: {scalar.value:.9g} → {value:.9g}, which the reference computes"
                    edits = ((scalar.number, partial(with_computed_number, scalar, number)),)
                    repair = Repair(scalar.number, text, scalar.operation, literal=True, edits=edits)
                    yield _Attempt(1, repair, scalar.change(self.side, value))
            solutions = [(1, value) for value in known if not _rounds_to(value, scalar.value)]
            solved = self._as_before(scalar) if self.text else self._solved(scalar)
            solutions += [] if solved is None else [(2 if _rounds_to(solved, scalar.value) else 4, solved)]
            for rank, value in solutions:
                text = f"{kind(scalar.operation)}: {scalar.value:.9g} → {value:.9g}"
                rounding = _rounds_to(value, scalar.value)
                edits = ((scalar.number, partial(literal, scalar, value)),)
                repair = Repair(scalar.number, text, scalar.operation, "", rounding, not rounding, edits)
                yield _Attempt(rank, repair, scalar.change(self.side, value))
        yield from self._factors() if not self.text else ()
        for number in constants(self.side, self.region):
            table = self.side.value(number)
            for other in self._unrounded(table):
                repair = Repair(number, "is rounded to float32", self._user(number), self._name(number), True)
                yield _Attempt(1, repair, other)

    def _as_before(self, scalar: Scalar) -> float | None:
        """The number of the only repair that is tried, if it changes such a number."""
        before, _, after = self.text.partition(" → ")
        try:
            return float(after) if before == f"{kind(scalar.operation)}: {scalar.value:.9g}" else None
        except ValueError:  # the repair changes no number
            return None

    def _solved(self, scalar: Scalar) -> float | None:
        return self._solve(scalar) if self.budget > 0 and not self.is_discrete else None

    def _same_code(self) -> Iterator[_Attempt]:
        """All operations of one line of code, such as those of a loop's steps, computed otherwise."""
        groups: dict[object, list[Operation]] = {}
        for operation in self.region.operations:
            if operation.compute is not None and len(operation.outputs) == 1:
                groups.setdefault((operation.name, operation.lines), []).append(operation)
        sides = self.sides[0].plain(), self.side.plain()
        for first, *others in groups.values():
            inputs, old = [self.side.value(n) for n in first.inputs], self.side.value(first.outputs[0])
            for alternative in alternatives(first, inputs, old, 1) if others else ():
                edits = tuple(
                    (o.outputs[0], partial(computed_otherwise, o, alternative.text)) for o in (first, *others)
                )
                values = self._edited(sides, edits)
                if values is not None and self.budget > 0:
                    changes = {number: values.value(number) for number, _ in edits}
                    repair = Repair(first.outputs[0], alternative.text, first, edits=edits)
                    yield _Attempt(alternative.rank + 1, repair, changes.pop(first.outputs[0]), changes)

    def _literals_of_lines(self) -> Iterator[_Attempt]:
        """All numbers of one line of code, for which the end equals the target for other inputs too."""
        lines: dict[str, list[Scalar]] = {}
        for scalar in scalars(self.side, self.region):
            lines.setdefault(scalar.operation.line, []).append(scalar)
        for line, numbers in lines.items():
            solvable = line and 1 < len(numbers) <= _LITERALS and not self.is_discrete and self.budget > 0
            solved = self._solve_all(numbers) if solvable else None
            numbers, solved = self._fewest(numbers, solved) if solved else (numbers, None)
            short = [_as_in_code(n, s.value) for n, s in zip(solved or (), numbers, strict=bool(solved))]
            for solution in (short, solved) if solved else ():
                changed = [(s, n) for s, n in zip(numbers, solution, strict=True) if not _rounds_to(n, s.value)]
                values = self._edited((self.sides[0].plain(), self.side.plain()), literals(changed))
                if values is not None and changed:
                    first = changed[0][0]
                    text = ", ".join(f"{kind(s.operation)}: {s.value:.9g} → {n:.9g}" for s, n in changed)
                    repair = Repair(first.number, text, first.operation, literal=True, edits=literals(changed))
                    changes = {scalar.number: values.value(scalar.number) for scalar, _ in changed}
                    yield _Attempt(2, repair, changes.pop(first.number), changes)

    def _orders(self) -> Iterator[_Attempt]:
        """Reversals within the lengths of the rows, and other pairs of rotary embeddings."""
        sources = within_lengths(self.side, self.region), paired_otherwise(self.side, self.region)
        for text, operation, edits in chain(*sources):
            values = self._edited((self.sides[0].plain(), self.side.plain()), edits)
            if values is not None:
                changes = {number: values.value(number) for number, _ in edits}
                first = edits[0][0]
                value, repair = changes.pop(first), Repair(first, text, operation, edits=edits)
                yield _Attempt(2, repair, value, changes, is_structural=True)

    def _masks(self) -> Iterator[_Attempt]:
        """The reference's mask, as booleans or where it adds or fills in a huge negative number."""
        sources = dict.fromkeys(n for o in self.regions[0].operations for n in (*o.inputs, *o.outputs))
        for operation in self.tried:
            mask = next((n for n in operation.inputs if self.side.value(n).dtype == bool), None)
            if operation.name not in SELECTIONS or mask is None or operation.compute is None:
                continue
            shape = np.broadcast_shapes(*(self.side.value(n).shape for n in operation.inputs))
            own = np.broadcast_to(self.side.value(mask), shape)
            for source in sources:
                for inverted in (False, True) if fits_mask(self.sides[0].value(source), own.size) else ():
                    edit = partial(masked, operation, mask, source, inverted)
                    (number,) = operation.outputs
                    value, other = edit(self.sides)[number], mask_of(self.sides[0].value(source), own, inverted)
                    wrong = int((own & ~other).sum()), int((~own & other).sum())
                    text = (
                        f"{kind(operation)}: the mask differs: {wrong[0]} of {own.size} elements are True instead of "
                    )
                    text += f"False, {wrong[1]} False instead of True"
                    repair = Repair(number, text, operation, edits=((number, edit),))
                    yield _Attempt(2, repair, value)

    def _softmaxes(self) -> Iterator[_Attempt]:
        """A softmax that is computed step by step, over another axis."""
        made = self.made
        for operation in self.region.operations:
            steps = [operation]
            while len(steps) < len(_SOFTMAX) and steps[-1].inputs and steps[-1].inputs[0] in made:
                steps.append(made[steps[-1].inputs[0]])
            if tuple(map(kind, steps)) != _SOFTMAX:
                continue
            number = steps[-1].inputs[0]
            for axis in range(self.side.value(number).ndim):
                edit = partial(function_of, number, operation.outputs[0], partial(special.softmax, axis=axis))
                repair = Repair(operation.outputs[0], f"should be softmax over axis {axis}", operation)
                repair = replace(repair, edits=((repair.number, edit),))
                yield _Attempt(1, repair, edit(self.sides)[repair.number])

    def _pools(self) -> Iterator[_Attempt]:
        """An average over each window with its padding, or without."""
        sums = {o.outputs[0]: o for o in self.region.operations if o.name == "reduce_window_sum"}
        for operation in self.region.operations:
            pool = sums.get(operation.inputs[0]) if kind(operation) == "div" and operation.inputs else None
            if pool is not None and pool.compute is not None:
                for padded in (True, False):
                    edit = partial(averaged, operation.outputs[0], pool, padded)
                    text = f"div: padding {'counts' if padded else 'does not count'}"
                    repair = Repair(operation.outputs[0], text, operation, edits=((operation.outputs[0], edit),))
                    yield _Attempt(2, repair, edit(self.sides)[operation.outputs[0]])

    def _solve_all(self, numbers: Sequence[Scalar]) -> list[float] | None:
        """The numbers for which the ends are nearest to the targets (Gauss-Newton)."""
        solution = np.array([scalar.value for scalar in numbers])
        for _ in range(_STEPS):
            residual = self._residual(numbers, solution)
            if residual is None:
                return None
            columns = []
            for i, number in enumerate(solution):
                step = np.zeros(len(solution))
                step[i] = 1e-4 * abs(number) or 1e-6
                moved = self._residual(numbers, solution + step)
                if moved is None:
                    return None
                columns.append((moved - residual) / step[i])
            slopes = np.stack(columns, 1)
            if not (np.isfinite(slopes).all() and np.abs(slopes).max(initial=0) < _STEEP):
                return None
            correction = np.linalg.lstsq(slopes, -residual, rcond=None)[0]
            if not np.isfinite(correction).all() or np.abs(solution + correction).max() > 1e12:
                return None
            solution = solution + correction
            if (np.abs(correction) <= 1e-12 * np.abs(solution)).all():
                break
        return solution.tolist()

    def _fewest(self, numbers: list[Scalar], solution: list[float]) -> tuple[list[Scalar], list[float]]:
        """A solution of these numbers or of fewer, if the others may stay as they are."""
        largest = float(np.abs(real_numbers(self.target)).max(initial=0))
        for scalar in numbers if self._is_near(numbers, solution, largest) else ():
            fewer = [other for other in numbers if other is not scalar]
            solved = self._solve_all(fewer) if fewer else None
            if solved is not None and self._is_near(fewer, solved, largest):
                numbers, solution = fewer, solved
        return numbers, solution

    def _is_near(self, numbers: Sequence[Scalar], solution: Sequence[float], largest: float) -> bool:
        residual = self._residual(numbers, np.array(solution))
        return residual is not None and float(np.abs(residual).max(initial=0)) <= self.bound * largest

    def _residual(self, numbers: Sequence[Scalar], values: Array) -> Array | None:
        """ends - targets for all inputs, with these numbers in the code; None if that cannot be computed."""
        edits = literals(list(zip(numbers, values.tolist(), strict=True)))
        own = self._edited((self.sides[0].plain(), self.side.plain()), edits)
        ends = [(None if own is None else own.value(self.region.end), self.target), *self._ends_after(edits)]
        same = ((end, target) for end, target in ends if end is not None and end.shape == target.shape)
        parts = [np.ravel(real_numbers(end - target)) for end, target in same]
        complete = len(parts) == len(ends) and all(np.isfinite(part).all() for part in parts)
        return np.concatenate(parts) if complete else None

    def _factors(self) -> Iterator[_Attempt]:
        """A factor that is missing after an operation, whatever number it is."""
        for operation in self.region.operations if self.below > _FACTOR and not self.is_discrete else ():
            for number in operation.outputs:
                value = self.side.value(number)
                if value.dtype.kind in "fc" and np.isfinite(value).all() and self.budget > 0:
                    scalar = Scalar(operation, 1.0, number, partial(scaled, number))
                    factor = self._solve(scalar)
                    if factor and not _rounds_to(factor, 1.0):
                        text = f"missing: * {factor:.9g}" if abs(factor) >= 1 else f"missing: / {1 / factor:.9g}"
                        edits = ((number, partial(literal, scalar, factor)),)
                        yield _Attempt(_FACTOR, Repair(number, text, operation, edits=edits), value * factor)

    def _name(self, number: int) -> str:
        return self.names.get(number, "a constant")

    def _unrounded(self, table: Array) -> Iterator[Array]:
        """Values of the reference that are this table once they are rounded to float32."""
        if table.dtype.kind == "f" and table.size > 1:
            for number in {n for o in self.regions[0].operations for n in (*o.inputs, *o.outputs)}:
                value = self.sides[0].value(number)
                if value.size == table.size and value.dtype.kind == "f":
                    yield from (a for a in alignments(value, table) if same_order(a, table, FLOAT32))

    def _solve(self, scalar: Scalar) -> float | None:
        """The number for which the end is nearest to the target (Gauss-Newton)."""
        number = scalar.value
        for _ in range(_STEPS):
            step = 1e-4 * abs(number) or 1e-6
            one, other = (self._end({scalar.number: scalar.change(self.side, n)}) for n in (number, number + step))
            if one is None or other is None:
                return None
            with np.errstate(invalid="ignore"):  # infinities
                slope, error = (real_numbers(a) for a in ((other - one) / step, self.target - one))
            finite = np.isfinite(slope) & np.isfinite(error)
            square = float(np.square(slope[finite]).sum())
            correction = float((slope[finite] * error[finite]).sum()) / square if square else np.nan
            if not np.isfinite(correction) or abs(number + correction) > 1e12:
                return None
            number += correction
            if abs(correction) <= 1e-14 * abs(number):
                break
        return _as_in_code(number, scalar.value)

    def _insertions(self) -> Iterator[_Attempt]:
        """A step that the candidate leaves out: with one of the reference's values, or with a number."""
        names = {number: name for name, number in self.sides[0].trace.parameters.items()}
        operands: list[tuple[Operand, str]] = []
        operands += [(each, names.get(n, _VALUE)) for n in self.regions[0].leaves for each in self._operands(n)]
        operands += [(np.asarray(s.value), f"{s.value:.9g}") for s in scalars(self.sides[0], self.regions[0])]
        used = (self.side.value(n) for operation in self.region.operations for n in operation.inputs)
        sizes = sorted({size for value in used for size in value.shape if size > 1})
        operands += [(np.asarray(size**power), f"{size}{text}") for size in sizes for power, text in _POWERS]
        made = self.made
        entering = list(self._entering())
        whole = [(number, operation) for number, operation in entering if self.side.value(number).dtype.kind == "i"]
        places = [*whole, *self._places(), *(each for each in entering if each not in whole)]
        reference = self.regions[0].operations if len(self.regions[0].operations) <= _OPERANDS else ()
        inner = [n for operation in reference for n in operation.outputs if n != self.regions[0].end]
        computed = [(each, _VALUE) for n in inner for each in self._operands(n)]
        # a number explains more than a value that the candidate does not have
        for (values, least), (number, operation) in product(((operands, 0), (computed, _COMPUTED)), places):
            for place, alternative in enumerate(inserted(self.sides, number, values)):
                edits = ((number, partial(insertion, number, values, place)),)
                own = operation
                while alternative.text not in RESIDUALS and own.name in PASSING and own.inputs[0] in made:
                    own = made[own.inputs[0]]  # people leave out a number or a parameter where the value is computed
                repair = Repair(number, alternative.text, own, edits=edits)
                yield _Attempt(max(alternative.rank, least), repair, alternative.value)
        end = self.side.value(self.region.end)
        last = self.region.operations[-1] if self.region.operations else None
        with np.errstate(all="ignore"):
            ratio = float(np.square(real_numbers(self.target)).sum() / real_numbers(self.target * end).sum())
        if last is not None:
            scalar = Scalar(last, 1.0, self.region.end, partial(scaled, self.region.end))
            edits = ((self.region.end, partial(literal, scalar, ratio)),)
            yield _Attempt(5, Repair(self.region.end, f"missing: * {ratio:.9g}", last, edits=edits), end * ratio)

    def _operands(self, number: int) -> Iterator[Operand]:
        """A value of the reference, and the candidate's with the same numbers in another shape, as channels last."""
        value = self.sides[0].value(number)
        yield 0, number
        shapes = {value.shape}
        for other in self.partners.get(number, ()) if value.ndim > 1 else ():
            if self.side.value(other).shape not in shapes:
                shapes.add(self.side.value(other).shape)
                yield 1, other

    def _places(self) -> Iterator[tuple[int, Operation]]:
        """The region's values with their operations; one that is only passed on counts where it is passed on."""
        users: dict[int, list[Operation]] = {}
        for operation in self.region.operations:
            for number in operation.inputs:
                users.setdefault(number, []).append(operation)
        for operation in self.tried:
            for number in operation.outputs:
                if not (users.get(number) and all(user.name in PASSING for user in users[number])):
                    yield number, operation

    def _entering(self) -> Iterator[tuple[int, Operation]]:
        """(value that nothing outside uses, or the end of an empty region; the operation that computed or uses it)."""
        inside = set(map(id, self.region.operations))
        shared = {n for o in self.side.trace.operations if id(o) not in inside for n in o.inputs}
        inputs = {*self.side.trace.inputs.values()}
        for number in self.region.leaves:
            is_index = self.side.value(number).dtype.kind == "i"  # whose other uses may not be seen to differ
            operation = self.made.get(number) or (self._user(number) if number in inputs else None)
            if operation is not None and (number not in shared or not inside or is_index):
                yield number, operation

    def _explanations(self) -> Iterator[_Attempt]:
        """The end as one known function of a value that enters the region, or that is computed on the way.

        Code of many lines is hardly meant to be one function: then a value of another place may be meant.
        """
        rank = 2 if len({operation.line for operation in self.region.operations}) <= _LINES else WEAK
        last = self.region.operations[-1] if self.region.operations else None
        inner = [n for operation in self.region.operations for n in operation.outputs if n != self.region.end]
        for number in (*self.region.leaves, *inner):
            value = self.side.value(number)
            if value.shape == self.target.shape and value.dtype.kind == "f":
                functions = {
                    **UNARY,
                    **{f"softmax over axis {i}": partial(special.softmax, axis=i) for i in range(value.ndim)},
                }
                for text, function in functions.items():
                    if last is not None and kind(last) == text:  # it is this function already
                        continue
                    edits = ((self.region.end, partial(function_of, number, self.region.end, function)),)
                    with np.errstate(all="ignore"):
                        result = function(value)
                    yield _Attempt(rank, Repair(self.region.end, f"should be {text}", last, edits=edits), result)


def _as_in_code(number: float, old: float) -> float:
    """The short decimal, or fraction of 1, that a number is nearly equal to; else the number."""
    if abs(number) <= 1e-6 * abs(old):
        return 0.0
    for short in (float(f"{number:.6g}"), 1 / float(f"{1 / number:.6g}") if number else 0.0):
        if abs(short - number) <= 1e-6 * abs(number) and short != old:
            return short
    return number


def _rounds_to(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= FLOAT32 * abs(other)
