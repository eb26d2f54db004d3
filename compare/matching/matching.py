"""Which values of two traces are the same numbers in the same arrangement, and how far apart the others are."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import islice, permutations
from math import inf, isfinite
from time import process_time
from typing import Self

import numpy as np

from ..capture.arrays import LARGE, is_narrow, widened
from ..capture.trace import Operation, Trace
from .arrangements import Layout, find_layout, real_numbers
from .states import state_pairs

Array = np.ndarray
EXACT = 1e-9  # a correct port in float64 stays below it
ROUNDED = 3e-6  # a port whose constants were rounded to float32 stays below it
# errors of an operation whose inputs were changed to what does not fit, as of another shape
FAILURES = ValueError, IndexError, TypeError, RuntimeError, AssertionError, ZeroDivisionError
_FEW = 4  # values with fewer different numbers identify nothing
_FILL = 1e3  # from here on, the largest element may be the fill value of a mask
_SAMPLE = 64  # elements of a value that are compared first


class Signature:
    """What identifies a value whatever its arrangement: its numbers in order of size, sorted when they are needed."""

    def __init__(self, value: Array):
        """Of a value in any dtype."""
        self.value, self.size = value, value.size
        numbers = self._finite()
        self.scale = float(max(numbers.max(initial=0), -numbers.min(initial=0)))  # the largest |number|
        unit = 1.0 if 1e-100 < self.scale < 1e100 else self.scale or 1.0  # whose squares are numbers
        flat = np.ravel(numbers) / unit if unit != 1.0 else np.ravel(numbers)
        self.rms = unit * float(np.sqrt(np.einsum("i,i->", flat, flat) / max(flat.size, 1)))
        self._ordered: Array | None = None

    def _finite(self) -> Array:
        value = real_numbers(widened(self.value))
        finite = np.isfinite(value)
        return value if finite.all() else value[finite]

    @property
    def ordered(self) -> Array:
        """The finite numbers from the smallest to the largest; those of a large value are sorted each time."""
        if self._ordered is not None:
            return self._ordered
        ordered = np.sort(self._finite(), axis=None)
        if ordered.size < LARGE:
            self._ordered = ordered
        return ordered


def signature(value: Array) -> Signature | None:
    """None for values that identify nothing: integers, booleans, and those with few different numbers."""
    kept, value = value, real_numbers(widened(value))
    if value.dtype.kind != "f" or value.size < _FEW:
        return None
    first = {number for number in value.flat[:_FEW].tolist() if isfinite(number)}  # mostly they are different
    if len(first) < _FEW and len(_different(value.flat[:_SAMPLE])) < _FEW and len(_different(value)) < _FEW:
        return None
    return Signature(kept if is_narrow(kept) else value)


def contents(value: Array) -> int:
    """What identifies masks, token ids and other values without a signature: their numbers in order.

    A mask in which True and False are swapped has the same contents.
    """
    if value.dtype == bool and value.size:
        value = value ^ value.flat[0]
    return hash((value.size, np.ravel(real_numbers(value)).astype(np.float64).tobytes()))


def _different(value: Array) -> Array:
    return np.unique(value[np.isfinite(value)])


def distance(one: Signature, other: Signature) -> float:
    """Largest difference of the ordered numbers, relative to the largest number."""
    if one.size != other.size:
        return float("inf")
    a, b = one.ordered, other.ordered
    return float(np.abs(a - b).max() / max(one.scale, other.scale)) if len(a) == len(b) else float("inf")


def proportion(one: Signature, other: Signature) -> float:
    """1 - |cosine| of the ordered numbers: 0 if both are proportional, whatever their arrangement."""
    a, b = one.ordered, other.ordered
    if len(a) != len(b):
        return 1.0
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return 1.0 - float(max(abs(a @ b), abs(a @ b[::-1])) / lengths) if lengths else 1.0


class Deadline:
    """When a search for differences and repairs ends, with what it found until then.

    It counts processor time, so that other programs on the machine change no verdict.
    """

    def __init__(self) -> None:
        self.seconds = inf
        self._end = inf

    def start(self, seconds: float) -> None:
        """It ends in so many seconds."""
        self.seconds, self._end = seconds, process_time() + seconds

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return process_time() > self._end


class Values:
    """A trace with some values changed."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.changes: dict[int, Array] = {}
        self.work = [0.0]  # numbers that all replays together computed, also those of changed copies
        self.deadline = Deadline()  # shared by changed copies
        self.forced: set[int] = set()  # changes that stay whatever happens before them

    def value(self, number: int) -> Array:
        """The value with this number, as changed."""
        return self.changes[number] if number in self.changes else self.trace.values[number]

    def changed(self, changes: Mapping[int, Array], forced: Iterable[int]) -> Self:
        """These values with further changes, which the values with the numbers `forced` led to."""
        values = copy(self)
        values.__dict__.pop("_current", None)
        values.forced = {*self.forced, *forced}
        values.changes = {**self.changes, **changes}
        return values

    def replay(
        self, changes: Mapping[int, Array], operations: Iterable[Operation] | None = None, limit: int | None = None
    ) -> dict[int, Array]:
        """The values that these changes lead to, themselves included; after at most `limit` operations.

        If an operation cannot be computed with them, nothing follows.
        """
        try:
            return self._current.replay(changes, operations, self.forced, limit, self.work)
        except FAILURES:
            return dict(changes)

    @cached_property
    def _current(self) -> Trace:
        """The trace with the changed values."""
        if not self.changes:
            return self.trace
        current = copy(self.trace)
        current.values = self.trace.values.with_changes(self.changes)
        return current

    def continued(self, changes: Mapping[int, Array]) -> Self:
        """These values after changes, and all that follows from them."""
        return self.changed(self.replay(changes), changes)


class Side(Values):
    """A trace with some values changed, and the signatures of all, each computed once."""

    def __init__(self, trace: Trace):
        super().__init__(trace)
        numbers = range(len(trace.values))
        self.by_number = {i: s for i in numbers if (s := signature(trace.values.kept(i))) is not None}
        self.contents = {i: contents(trace.values[i]) for i in numbers if i not in self.by_number}

    def plain(self) -> Values:
        """The same values without signatures."""
        values = Values(self.trace)
        values.changes, values.forced, values.work = self.changes, self.forced, self.work
        values.deadline = self.deadline
        return values

    def with_outputs(self, outputs: Mapping[str, int]) -> Self:
        """This side, of whose trace these are the outputs."""
        side = copy(self)
        side.trace = copy(self.trace)
        side.trace.outputs = dict(outputs)
        return side

    def changed(self, changes: Mapping[int, Array], forced: Iterable[int]) -> Self:
        """This side with further changes, which the values with the numbers `forced` led to."""
        side = super().changed(changes, forced)
        side.__dict__.pop("by_size", None)
        side.by_number, side.contents = dict(self.by_number), dict(self.contents)
        for number, value in changes.items():
            new = signature(value)
            side.by_number.pop(number, None)
            side.contents.pop(number, None)
            if new is None:
                side.contents[number] = contents(value)
            else:
                side.by_number[number] = new
        return side

    @cached_property
    def by_size(self) -> dict[int, tuple[Array, list[int]]]:
        """Size -> (root mean squares in ascending order, numbers of the values)."""
        groups: dict[int, list[tuple[float, int]]] = {}
        for number, one in self.by_number.items():
            groups.setdefault(one.size, []).append((one.rms, number))
        ordered = {size: sorted(group) for size, group in groups.items()}
        return {size: (np.array([rms for rms, _ in g]), [n for _, n in g]) for size, g in ordered.items()}

    def partners(self, one: Signature, value: Array, bound: float = EXACT) -> Iterator[int]:
        """Numbers of the values that are equal to `value`, which has this signature, in any arrangement of axes."""
        for number in self.alike(one, bound):
            other, scale = self.value(number), self.by_number[number].scale
            if (
                _close(np.ravel(other), np.ravel(value), bound, scale)
                or _transposed(other, value, bound, scale)
                or (distance(self.by_number[number], one) <= bound and arranged(other, value, bound))
            ):
                yield number

    def alike(self, one: Signature, bound: float) -> Iterator[int]:
        """Numbers of the values with this root mean square and largest number: hardly any others have the same ones."""
        sizes, numbers = self.by_size.get(one.size, (np.zeros(0), []))
        slack = bound * one.scale
        low, high = np.searchsorted(sizes, [one.rms - slack, one.rms + slack])
        for number in numbers[low:high]:
            if abs(self.by_number[number].scale - one.scale) <= slack:
                yield number


class Matches:
    """The values of a reference and a candidate that are equal within a bound, both ways; shuffles do not count."""

    def __init__(self, reference: Side, candidate: Side, bound: float = EXACT):
        self.reference, self.bound = reference, bound
        self.of_candidate: dict[int, tuple[int, ...]] = {}
        self.rearranged: set[int] = set()  # the candidate's that the reference has in another flat order only
        self._add(candidate, candidate.by_number)

    def updated(self, candidate: Side, changes: Iterable[int]) -> "Matches":
        """The matches after these values of the candidate changed."""
        matches = copy(self)
        changed = set(changes)
        matches.of_candidate = {n: others for n, others in self.of_candidate.items() if n not in changed}
        matches.rearranged = self.rearranged - changed
        matches._add(candidate, changed & candidate.by_number.keys())
        return matches

    def _add(self, candidate: Side, numbers: Iterable[int]) -> None:
        self.__dict__.pop("of_reference", None)
        for number in numbers:
            value = candidate.value(number)
            partners = tuple(self.reference.partners(candidate.by_number[number], value, self.bound))
            if partners:
                self.of_candidate[number] = partners
                if not any(same_order(self.reference.value(n), value, self.bound) for n in partners):
                    self.rearranged.add(number)

    @cached_property
    def of_reference(self) -> dict[int, tuple[int, ...]]:
        """The same the other way."""
        matches: dict[int, list[int]] = {}
        for number, partners in sorted(self.of_candidate.items()):
            for partner in partners:
                matches.setdefault(partner, []).append(number)
        return {number: tuple(partners) for number, partners in matches.items()}


def _transposed(one: Array, other: Array, bound: float, scale: float) -> bool:
    """Whether both have the same flat order once the axes of either are in another order."""
    pairs = [
        *((one.transpose(order), other) for order in islice(permutations(range(one.ndim)), 1, None)),
        *((one, other.transpose(order)) for order in islice(permutations(range(other.ndim)), 1, None)),
    ]
    for a, b in pairs:
        first = a.flat[:_SAMPLE], b.flat[:_SAMPLE]  # without a copy of the rest
        if _near(*first, bound * scale) and _close(np.ravel(a), np.ravel(b), bound, scale):
            return True
    return False


def arranged(one: Array, other: Array, bound: float) -> bool:
    """Whether `other` is an arrangement of the axes of `one`; both have the same numbers within the bound."""
    layout = find_arrangement(one, other, bound)
    return layout is not None and _close(np.ravel(layout.apply(one)), np.ravel(other), bound, _largest(one))


def find_arrangement(one: Array, other: Array, bound: float) -> Layout | None:
    """The layout in which `other` has the values of `one`; None if it is not an arrangement of axes."""
    flat, target = np.ravel(real_numbers(one)), np.ravel(real_numbers(other))
    scale = bound * _largest(one)
    order, order_of_other = np.argsort(flat, kind="stable"), np.argsort(target, kind="stable")
    index = np.empty(flat.size, np.int64)
    index[order_of_other] = order
    ordered = flat[order]
    tied = np.zeros(flat.size, bool)
    with np.errstate(invalid="ignore"):  # infinities are ties
        near = ~(np.diff(ordered) > 2 * scale)
    tied[1:] |= near
    tied[:-1] |= near
    index[order_of_other[tied]] = -1
    return find_layout(index.reshape(other.shape), flat.size) if (~tied).any() else None


def output_layout(one: Array, other: Array) -> Layout | None:
    """The layout in which `other`, an output that counts as equal, has the values of `one`; None: in the same order."""
    return None if same_order(one, other, ROUNDED) else find_arrangement(one, other, ROUNDED)


def _largest(array: Array) -> float:
    largest = float(np.abs(array).max(initial=0))
    if not np.isfinite(largest):
        largest = float(np.abs(array[np.isfinite(array)]).max(initial=0))
    return max(largest, 1e-300)


def same_order(one: Array, other: Array, bound: float, least: float = 0.0) -> bool:
    """Whether both have the same numbers in the same flat order, whatever their shapes.

    The bound is relative to the largest number, or to `least` if that is larger.
    """
    if one.dtype.kind in "biu" and other.dtype.kind in "biu":
        return np.array_equal(np.ravel(one), np.ravel(other))
    one, other = (a.astype(np.int8) if a.dtype == bool else a for a in (one, other))
    return one.size == other.size and _close(np.ravel(one), np.ravel(other), bound, _largest(one), least)


def _close(one: Array, other: Array, bound: float, largest: float, least: float = 0.0) -> bool:
    slack = np.asarray(bound * max(largest, least) if largest < _FILL else _slack(one, bound, largest))
    part = slack[:_SAMPLE] if slack.ndim else slack
    return _near(one[:_SAMPLE], other[:_SAMPLE], part) and _near(one, other, slack)


def _near(one: Array, other: Array, slack: Array | float) -> bool:
    """Whether all numbers are within the slack; NaN and infinities equal themselves."""
    if one.size > LARGE:  # piece by piece, within the processor's cache
        steps = [slice(i, i + LARGE) for i in range(0, one.size, LARGE)]
        return all(
            _near(one[s], other[s], slack[s] if isinstance(slack, np.ndarray) and slack.ndim else slack) for s in steps
        )
    with np.errstate(invalid="ignore"):  # infinities
        if (np.abs(one - other) <= slack).all():
            return True
    finite = np.isfinite(one) & np.isfinite(other)
    return not finite.all() and bool(np.isclose(one, other, rtol=0, atol=slack, equal_nan=True).all())


def _slack(array: Array, bound: float, largest: float) -> Array | float:
    """What each number may differ by: relative to the largest, but if that fills a mask, to the largest other one.

    Masks that overlap fill in several numbers, such as -1e9 and -2e9.
    """
    numbers = np.abs(array[np.isfinite(array)])
    others = float(numbers.max(initial=0, where=numbers < _FILL))
    if others > 0.01 * float(numbers.min(initial=largest, where=numbers >= _FILL)):
        return bound * largest
    return np.asarray(bound * np.maximum(np.where(np.isfinite(array), np.abs(array), 0), max(others, 1e-300)))


def alignments(value: Array, target: Array) -> list[Array]:
    """`value` in the shape of `target`: in the arrangement in which they are closest, and in the plainest one.

    The axes are permuted if that leads to the shape; otherwise the value is reshaped too.
    """
    orders = [order for order in permutations(range(value.ndim)) if value.transpose(order).shape == target.shape]
    arrays = [value.transpose(order) for order in orders] or list(orders_of_axes(value, target.shape))
    possible = [(float(np.square(difference(a, target)).sum()), a) for a in arrays]
    if not possible:
        return []
    closest, plain = min(possible, key=lambda entry: entry[0])[1], possible[0][1]
    return [closest] if np.array_equal(closest, plain, equal_nan=True) else [closest, plain]


def difference(one: Array, other: Array) -> Array:
    """|one - other|; where one is infinite or NaN and the other is not, ten times the largest finite number."""
    finite = np.isfinite(one) & np.isfinite(other)
    same = finite | (one == other) | (np.isnan(one) & np.isnan(other))
    numbers = [np.where(finite, array, 0.0) for array in (one, other)]
    largest = max(float(np.abs(array).max(initial=0)) for array in numbers)
    return np.where(same, np.abs(numbers[0] - numbers[1]), 10 * largest)


def orders_of_axes(value: Array, shape: Sequence[int]) -> Iterator[Array]:
    """Reshape of all orders of the axes of either; the plain reshape first."""
    if value.size != int(np.prod(shape)):
        return
    for order in permutations(range(value.ndim)):
        yield value.transpose(order).reshape(shape)
    for order in permutations(range(len(shape))):
        back = np.argsort(order)
        yield value.reshape([shape[i] for i in order]).transpose(back)


def with_common_outputs(traces: tuple[Trace, Trace]) -> tuple[tuple[Trace, Trace], list[str]]:
    """(traces with the outputs that both have, what is not compared): by name, by numbers, or else by size."""
    states = state_pairs(*traces)
    if not states:
        return _with_common_outputs(traces)
    outputs = [trace.outputs for trace in traces]
    rest = tuple(copy(trace) for trace in traces)
    for side, trace in enumerate(rest):
        updated = {pair[side] for pair in states}
        trace.outputs = {name: number for name, number in trace.outputs.items() if name not in updated}
    (reference, candidate), gaps = _with_common_outputs((rest[0], rest[1]))
    for side, trace in enumerate((reference, candidate)):
        trace.outputs |= {pair[side]: outputs[side][pair[side]] for pair in states}
    return (reference, candidate), gaps


def _with_common_outputs(traces: tuple[Trace, Trace]) -> tuple[tuple[Trace, Trace], list[str]]:
    few, many = sorted((0, 1), key=lambda side: len(traces[side].outputs))
    own, others = traces[few].outputs, traces[many].outputs
    if len(own) == len(others) or not own:
        return traces, []
    chosen: list[str] = []
    for name, number in own.items():
        value = traces[few].values[number]
        alike = [n for n, i in others.items() if n not in chosen and traces[many].values[i].size == value.size]
        alike.sort(key=lambda n, value=value: not same_order(traces[many].values[others[n]], value, ROUNDED))
        named = [name] if own.keys() <= others.keys() else alike[:1]
        if not named:
            return traces, []
        chosen += named
    restricted = copy(traces[many])
    restricted.outputs = {name: others[name] for name in chosen}
    sides = ("reference", "candidate")
    gaps = [f"output {n} of the {sides[many]}: the {sides[few]} has none for it" for n in others if n not in chosen]
    return ((restricted, traces[few]) if many == 0 else (traces[few], restricted)), gaps


def output_pairs(reference: Trace, candidate: Trace) -> list[tuple[str, str]]:
    """(name of the reference's output, of the candidate's): by name, or else by order."""
    one, other = reference.outputs, candidate.outputs
    return list(zip(one, one if one.keys() == other.keys() else other, strict=True))


def suspects(trace: Trace, matched: Container[int], outputs: Iterable[int]) -> set[int]:
    """Unmatched values from which one of these outputs, which differ, is reached through unmatched values alone.

    What lies between matched values, such as the steps of a norm that the other framework has as one operation, is
    thereby no fault.
    """
    suspect = set(outputs)
    for operation in reversed(trace.operations):
        if not suspect.isdisjoint(operation.outputs):
            suspect.update(number for number in operation.inputs if number not in matched)
    fixed = {*trace.parameters.values(), *trace.inputs.values(), *trace.settled}
    return {number for number in suspect if number not in fixed}


def producers(trace: Trace) -> dict[int, Operation]:
    """The operation that computed each value."""
    return {number: operation for operation in trace.operations for number in operation.outputs}
