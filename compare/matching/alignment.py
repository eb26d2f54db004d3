"""Two traces side by side: equal values on one row, and why the other values have no counterpart."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ..capture.trace import Operation, Trace

Mark = Literal["equal", "different", "unmatched"]


@dataclass(frozen=True)
class Pairing:
    """Which values of two traces are equal after every difference is repaired, by their indices."""

    equal: Mapping[int, tuple[int, ...]]  # value of the candidate -> values of the reference
    unidentified: tuple[frozenset[int], frozenset[int]]  # of each trace, values that too few numbers identify

    def of_side(self, side: int) -> dict[int, list[int]]:
        """Value of the reference (0) or of the candidate (1) -> equal values of the other."""
        pairs = [(number, other) for number, others in self.equal.items() for other in others]
        partners: dict[int, list[int]] = {}
        for pair in pairs:
            partners.setdefault(pair[1 - side], []).append(pair[side])
        return partners


@dataclass(frozen=True)
class Cell:
    """An operation of one side, and what is known about its value."""

    index: int  # position in the order of execution, from 1
    operation: Operation
    mark: Mark
    note: str
    difference: int = 0  # number of the difference that it is part of


Row = tuple[Cell | None, Cell | None]  # of the reference, of the candidate


@dataclass(frozen=True)
class Difference:
    """The operations of both sides between the last equal values and the first different ones."""

    number: int
    reference: Sequence[Operation]
    candidate: Sequence[Operation]
    repaired: Operation | None = None  # of the candidate


def side_by_side(
    traces: tuple[Trace, Trace], pairing: Pairing, differences: Sequence[Difference], differing: Sequence[str] = ()
) -> list[Row]:
    """The operations of both in order of execution; those with equal values share a row where the order allows it.

    `differing`: outputs of the candidate that still differ after all differences.
    """
    aligned = _aligned(traces, pairing)
    sides = [_Side(side, traces, pairing, differences, differing) for side in range(2)]
    cells = [list(side.cells({pair[i] for pair in aligned})) for i, side in enumerate(sides)]
    rows: list[Row] = []
    start = [0, 0]
    for ends in (*aligned, (len(cells[0]), len(cells[1]))):
        between = (cells[side][start[side] : ends[side]] for side in range(2))
        rows += [(one, other) for one, other in zip_longest(*between)]
        if ends[0] < len(cells[0]):
            rows.append((cells[0][ends[0]], cells[1][ends[1]]))
        start = [end + 1 for end in ends]
    return rows


def _aligned(traces: tuple[Trace, Trace], pairing: Pairing) -> list[tuple[int, int]]:
    """The longest list of (operation of the reference, of the candidate) with equal values that ascends on both sides.

    By the algorithm of Hunt and Szymanski: the longest ascending sequence of the pairs in order.
    """
    places = _places(traces[0])
    ends: list[int] = []  # the smallest last operation of the reference, for each length
    nodes: list[tuple[int, int, int]] = []  # (reference, candidate, node before)
    last: list[int] = []  # node of each length
    for index, operation in enumerate(traces[1].operations):
        partners = {places[n] for number in operation.outputs for n in pairing.equal.get(number, ()) if n in places}
        for partner in sorted(partners, reverse=True):
            length = bisect_left(ends, partner)
            nodes.append((partner, index, last[length - 1] if length else -1))
            if length == len(ends):
                ends.append(partner)
                last.append(len(nodes) - 1)
            else:
                ends[length], last[length] = partner, len(nodes) - 1
    pairs: list[tuple[int, int]] = []
    node = last[-1] if last else -1
    while node >= 0:
        one, other, node = nodes[node]
        pairs.append((one, other))
    return pairs[::-1]


def _places(trace: Trace) -> dict[int, int]:
    return {number: index for index, operation in enumerate(trace.operations) for number in operation.outputs}


class _Side:
    """One trace, and what its values are called on the other side."""

    def __init__(
        self,
        side: int,
        traces: tuple[Trace, Trace],
        pairing: Pairing,
        differences: Sequence[Difference],
        differing: Sequence[str],
    ):
        self.trace, self.other = traces[side], traces[1 - side]
        self.other_name = ("candidate", "reference")[side]
        self.partners, self.unidentified = pairing.of_side(side), pairing.unidentified[side]
        self.places = _places(self.other)
        self.names = {n: f"input {name}" for name, n in self.other.inputs.items()} | {
            n: f"parameter {name}" for name, n in self.other.parameters.items()
        }
        self.known = {*pairing.of_side(1 - side), *self.names}  # values of the other that this side has too
        operations = ((d.number, o) for d in differences for o in (d.reference, d.candidate)[side])
        self.differences = {number: difference for difference, o in operations for number in o.outputs}
        self.repaired = {n for d in differences if side and d.repaired is not None for n in d.repaired.outputs}
        self.after = self._after() if side else {}
        self.live = self.trace.ancestors()
        open_outputs = [self.trace.outputs[name] for name in differing] if side else []
        self.open = self.trace.ancestors(open_outputs) if open_outputs else set()
        self.next = self._next_equal()

    def _after(self) -> dict[int, set[int]]:
        """Value -> the differences that it depends on."""
        after = {number: {difference} for number, difference in self.differences.items()}
        for operation in self.trace.operations:
            before = set().union(*(after.get(number, ()) for number in operation.inputs))
            if before:
                for number in operation.outputs:
                    after[number] = after.get(number, set()) | before
        return after

    def _next_equal(self) -> dict[int, int]:
        """Value -> the first computed value of the other side that it leads to."""
        following: dict[int, int] = {}
        for operation in reversed(self.trace.operations):
            equal = [n for number in operation.outputs for n in self.partners.get(number, ()) if n in self.places]
            ends = equal or [following[number] for number in operation.outputs if number in following]
            following |= dict.fromkeys(operation.inputs, min(ends)) if ends else {}
        return following

    def cells(self, aligned: set[int]) -> Iterator[Cell]:
        """All operations in order; those in `aligned` have their counterpart on the same row."""
        for index, operation in enumerate(self.trace.operations):
            difference = next((self.differences[n] for n in operation.outputs if n in self.differences), 0)
            if difference:
                repaired = not self.repaired.isdisjoint(operation.outputs)
                yield Cell(index + 1, operation, "different", "the repair is here" if repaired else "", difference)
            elif any(number in self.partners for number in operation.outputs):
                yield Cell(index + 1, operation, "equal", self._equal_note(operation, index in aligned))
            elif not self.open.isdisjoint(operation.outputs):
                yield Cell(index + 1, operation, "different", "leads to an output that differs")
            else:
                yield Cell(index + 1, operation, "unmatched", self._unmatched_note(operation))

    def _equal_note(self, operation: Operation, has_row: bool) -> str:
        number = next(n for n in operation.outputs if n in self.partners)
        notes = [] if has_row else [self._elsewhere(self.partners[number][0])]
        after = sorted(self.after.get(number, ()))
        if after:
            numbers = " and ".join(map(str, after[:2])) + (f" and {len(after) - 2} more" if after[2:] else "")
            notes.append(f"after the repair of {numbers}")
        return "; ".join(notes)

    def _elsewhere(self, number: int) -> str:
        if number in self.places:
            return f"value of the {self.other_name}'s operation {self.places[number] + 1}"
        name = self.names.get(number)
        return f"the {self.other_name}'s {name}" if name else f"a constant of the {self.other_name}"

    def _unmatched_note(self, operation: Operation) -> str:
        """Why a value without a counterpart is no fault, as far as that is known."""
        if self.live.isdisjoint(operation.outputs):
            return "no output depends on it"
        if self.unidentified.issuperset(operation.outputs):
            return "too few different numbers to identify it"
        end = next((self.next[n] for n in operation.outputs if n in self.next), None)
        if end is None:
            return f"the {self.other_name} has no such value"
        producer = self.other.operations[self.places[end]]
        where = f"the {self.other_name}'s operation {self.places[end] + 1}, {producer.name}"
        return f"a step inside {where}" if self.known.issuperset(producer.inputs) else f"another way to {where}"
