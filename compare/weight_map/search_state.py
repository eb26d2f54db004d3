"""The candidate's values during the search for its parameters' sources: blocks, dependencies on them, replays."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.arrangements import Layout
from ..matching.matching import Side, producers
from ..matching.weights import Part
from .guesses import Guess

Array = np.ndarray
Choice = Mapping[str, Guess]  # block -> how it is built
_FAILURES = (ValueError, IndexError, TypeError, RuntimeError, AssertionError, ZeroDivisionError)  # it does not fit


@dataclass(frozen=True)
class Block:
    """A region of a parameter that is decided as one: all of it, a layer of a stack, or a part of a packed one."""

    name: str
    row: tuple[int, ...]  # leading indices into the parameter: the steps of scans
    region: tuple[slice, ...]  # of what these indices leave
    numbers: tuple[int, ...]  # the values that hold what these indices leave

    @property
    def key(self) -> str:
        """A unique name."""
        inner = ",".join(f"{part.start}:{part.stop}" for part in self.region)
        return f"{self.name}[{','.join(map(str, self.row))}][{inner}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The region's shape."""
        return tuple(part.stop - part.start for part in self.region)

    def start(self, shape: Sequence[int]) -> int:
        """Flat index of the block's row in a parameter of this shape."""
        return sum(i * prod(shape[axis + 1 :]) for axis, i in enumerate(self.row))


def blocks(trace: Trace, names: Iterable[str]) -> dict[str, Block]:
    """One block per parameter, or per row of one that scans alone use."""
    numbers = {trace.parameters[name]: name for name in reversed(list(names))}
    users = _users(trace)
    entries: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    pending = [(name, (), number) for number, name in numbers.items()]
    while pending:
        name, row, number = pending.pop()
        own = users.get(number, [])
        if own and all(operation.name == "scan.row" for operation in own):
            pending += [(name, (*row, operation.settings["row"]), operation.outputs[0]) for operation in own]
        else:
            entries.setdefault((name, row), []).append(number)
    whole = {at: tuple(slice(0, n) for n in trace.values[places[0]].shape) for at, places in entries.items()}
    blocks = (Block(*at, whole[at], tuple(places)) for at, places in sorted(entries.items()))
    return {block.key: block for block in blocks}


def _users(trace: Trace) -> dict[int, list[Operation]]:
    """The operations that use each value."""
    users: dict[int, list[Operation]] = {}
    for operation in trace.operations:
        for number in operation.inputs:
            users.setdefault(number, []).append(operation)
    return users


class _Dependencies:
    """Which blocks each value of a trace depends on, as bits."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.bits: dict[str, int] = {}
        self.known: dict[int, int] = {}  # found by changing blocks, where fewer matter than the operations use
        self.masks: list[int] = []

    def update(self, open_blocks: Mapping[str, Block]) -> None:
        """Compute the masks of all values."""
        masks, open_mask = [0] * len(self.trace.values), 0
        for key, block in open_blocks.items():
            bit = self.bits.setdefault(key, 1 << len(self.bits))
            open_mask |= bit
            for number in block.numbers:
                masks[number] |= bit
        for operation in self.trace.operations:
            mask = 0
            for number in operation.inputs:
                mask |= masks[number]
            for number in operation.outputs:
                masks[number] |= mask & self.known.get(number, mask) & open_mask
        self.masks = masks

    def keys(self, mask: int) -> tuple[str, ...]:
        """The blocks of a mask."""
        return tuple(key for key, bit in self.bits.items() if bit & mask)


def _live(trace: Trace) -> set[int]:
    """Values that depend on the inputs."""
    live = set(trace.inputs.values())
    for operation in trace.operations:
        if not live.isdisjoint(operation.inputs):
            live.update(operation.outputs)
    return live


@lru_cache(maxsize=65536)
def elements(layout: Layout) -> Array:
    """Flat indices into the source."""
    return np.ravel(layout.apply(np.arange(layout.source_size)))


class State:
    """What is decided, which options are left, and the candidate's values so far."""

    def __init__(self, reference: Trace, candidate: Trace, names: tuple[Iterable[str], Iterable[str]]):
        self.reference, self.candidate = Side(reference), copy(candidate)
        self.values = self.candidate.values = list(candidate.values)
        self.sources = blocks(reference, names[0])
        self.arrays = {key: reference.values[block.numbers[0]] for key, block in self.sources.items()}
        self.unused = {key: np.ones(array.size, bool) for key, array in self.arrays.items()}
        self.open = blocks(candidate, names[1])
        self.decided: dict[str, tuple[Block, Guess]] = {}
        self.groups: list[list[Choice]] = []  # joint options of blocks; a block is in one group at most
        self.of_reference, self.of_candidate = _Dependencies(reference), _Dependencies(self.candidate)
        self.live = _live(reference), _live(self.candidate)
        self.producers, self.users = producers(self.candidate), _users(self.candidate)
        self.order = {id(operation): i for i, operation in enumerate(self.candidate.operations)}
        self.shared = _used_repeatedly(reference, self.sources)
        self.pinned = {number for block in self.open.values() for number in block.numbers}  # never computed
        self.evaluations = 0  # in this step
        self.views: dict[int, bool] = {}
        self.mattering: dict[tuple[int, int], set[str]] = {}
        self.failed: set[object] = set()
        self.random = np.random.default_rng(2)
        self.of_candidate.update(self.open)
        self.of_reference.update(self.sources)

    def take(self, parts: Iterable[Part]) -> None:
        """Mark what given matches use of the sources."""
        for part in parts:
            used = elements(part.layout)
            for key, block in self.sources.items():
                if block.name == part.source:
                    size = self.arrays[key].size
                    start = block.start(self.reference.trace.values[self.reference.trace.parameters[block.name]].shape)
                    own = used[(used >= start) & (used < start + size)] - start
                    self.unused[key][own] = False
        self.settle()

    def evaluate(self, number: int, arrays: Mapping[str, Array]) -> Array | None:
        """A value of the candidate, with these arrays for blocks; None if it cannot be computed."""
        self.evaluations += 1
        changes: dict[int, Array] = {}
        for key in {*self.of_candidate.keys(self.of_candidate.masks[number]), *arrays}:
            block = self.open[key]
            for holder in block.numbers:
                changes.setdefault(holder, self.values[holder].copy())
                if key in arrays:
                    changes[holder][block.region] = arrays[key]
        try:
            with np.errstate(all="ignore"):
                for operation in self.path(number):
                    arguments = [changes.get(n, self.values[n]) for n in operation.inputs]
                    if operation.compute is not None:
                        results = operation.compute(arguments, operation.settings)
                        changes |= {
                            n: r for n, r in zip(operation.outputs, results, strict=True) if n not in self.pinned
                        }
        except _FAILURES:
            return None
        return changes.get(number, self.values[number])

    def path(self, number: int) -> list[Operation]:
        """The operations that compute a value from decided ones, in order."""
        path: dict[int, Operation] = {}
        pending = [number]
        while pending:
            operation = self.producers.get(pending.pop())
            if operation is not None and id(operation) not in path:
                path[id(operation)] = operation
                pending += [n for n in operation.inputs if self.of_candidate.masks[n]]
        return sorted(path.values(), key=lambda operation: self.order[id(operation)])

    def is_free(self, guess: Guess) -> bool:
        """Whether no decided block uses the same elements of the sources."""
        return all(key in self.shared or self.unused[key][elements(guess.layout)].all() for key in guess.sources)

    def set_block(self, key: str, guess: Guess) -> None:
        """Set an undecided block, without what follows from it."""
        block = self.open.pop(key)
        for holder in block.numbers:
            self.values[holder] = self.values[holder].copy()
            self.values[holder][block.region] = guess.value(self.arrays, block.shape)
        self.decided[key] = block, guess
        for source in guess.sources:
            self.unused[source][elements(guess.layout)] = False

    def settle(self) -> None:
        """Compute the values that no longer depend on undecided blocks."""
        before = self.of_candidate.masks
        self.of_candidate.update(self.open)
        self.of_reference.update({key: block for key, block in self.sources.items() if self.unused[key].any()})
        masks = self.of_candidate.masks
        for operation in self.candidate.operations:
            if any(before[n] and not masks[n] for n in operation.outputs) and operation.compute is not None:
                self.compute(operation)

    def compute(self, operation: Operation) -> None:
        """Compute the outputs of an operation anew."""
        if any(self.of_candidate.masks[n] for n in operation.inputs):  # which do not matter
            for number in operation.outputs:
                value = self.evaluate(number, {})
                self.values[number] = self.values[number] if value is None else value
            return
        assert operation.compute is not None
        with np.errstate(all="ignore"):
            results = operation.compute([self.values[n] for n in operation.inputs], operation.settings)
        for number, result in zip(operation.outputs, results, strict=True):
            if number not in self.pinned:
                self.values[number] = result

    def replace_value(self, number: int, target: Array) -> None:
        """Set a known value, and the known ones that follow."""
        self.values[number] = target
        self.failed.clear()
        changed = {number}
        for operation in self.candidate.operations:
            known = not any(self.of_candidate.masks[n] for n in (*operation.inputs, *operation.outputs))
            if known and not changed.isdisjoint(operation.inputs) and operation.compute is not None:
                self.compute(operation)
                changed.update(operation.outputs)


def _used_repeatedly(trace: Trace, sources: Mapping[str, Block]) -> set[str]:
    """Sources that several operations use, or that have several names, such as tied embeddings."""
    counts: dict[int, int] = {}
    for operation in trace.operations:
        for number in set(operation.inputs):
            counts[number] = counts.get(number, 0) + 1
    return {key for key, block in sources.items() if sum(counts.get(n, 0) for n in block.numbers) > 1}
