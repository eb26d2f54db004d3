"""Searches for the sources of a candidate's parameters: guesses a few at a time, computes, and compares activations.

Both traces have random parameters. Blocks of the candidate's parameters are decided in the order in which the outputs
of operations come to depend on few undecided ones. Options that local values do not separate, such as those of query,
key and value, are kept until later values do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations, islice, product, takewhile
from math import prod

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.arrangements import Layout
from ..matching.matching import FAILURES, Deadline, Side, alignments, producers, signature
from ..matching.weights import Part
from .blocks import Block, Dependencies, blocks, elements, live_values, used_repeatedly, users
from .guesses import Guess, guesses

Array = np.ndarray
Choice = Mapping[str, Guess]  # block -> how it is built
BOUND = 1e-5  # relative; above the rounding of constants to float32, far below the distance of other random numbers
_CLOSE = 0.1  # relative error below which values differ only by another epsilon or activation function
_MOST_BLOCKS = 16  # undecided blocks behind a value that is examined
_MOST_SINGLE = 4  # such blocks without options yet
_MOST_EVALUATIONS = 6_000  # per step
_MOST_TRIES = 600  # per value and pool of sources
_MOST_CLOSE = 60  # tries in which closeness is computed
_WINDOW = 30  # values examined in a step
_LOOKUPS = ("gather", "index", "embedding", "take", "select")  # they reach only some rows of a table


class ParameterSearch:
    """What is decided, which options are left, and the steps that decide more.

    It holds the candidate's values as far as they follow from what is decided.
    """

    def __init__(self, reference: Trace, candidate: Trace, names: tuple[Iterable[str], Iterable[str]]):
        self.reference, self.candidate = Side(reference), copy(candidate)
        self.values = self.candidate.values = candidate.values.with_changes({})
        self.sources = blocks(reference, names[0])
        self.arrays = {key: reference.values[block.numbers[0]] for key, block in self.sources.items()}
        self.unused = {key: np.ones(array.size, bool) for key, array in self.arrays.items()}
        self.open = blocks(candidate, names[1])
        self.decided: dict[str, tuple[Block, Guess]] = {}
        self.groups: list[list[Choice]] = []  # joint options of blocks; a block is in one group at most
        self.of_reference, self.of_candidate = Dependencies(reference), Dependencies(self.candidate)
        self.live = live_values(reference), live_values(self.candidate)
        self.producers, self.users = producers(self.candidate), users(self.candidate)
        self.order = {id(operation): i for i, operation in enumerate(self.candidate.operations)}
        self.shared = used_repeatedly(reference, self.sources)
        self.pinned = {number for block in self.open.values() for number in block.numbers}  # never computed
        self.evaluations = 0  # in this step
        self.deadline, self.reason = Deadline(), ""  # why the search ended early
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
        except FAILURES:
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

    def run(self, seconds: float, progress: Callable[[int, int], None]) -> None:
        """Decide as many blocks as values decide in so much processor time; the cheapest step that does comes first.

        `progress` is called with the numbers of decided blocks and of all.
        """
        self.deadline.start(seconds)
        steps = (
            partial(self.compare, True, 0),
            self.snap,
            self.split,
            partial(self.compare, True, 1),
            partial(self.compare, False, 0),
            partial(self.compare, True, 2),
            partial(self.compare, False, 1),
        )
        while self.open and not self.deadline.is_over and any(step() for step in steps):
            progress(len(self.decided), len(self.decided) + len(self.open))
        if self.open and self.deadline.is_over:
            self.reason = f"the search stopped after {seconds:.0f} s"

    def pending(self) -> Iterator[int]:
        """Values of the candidate that depend on inputs and on a few undecided blocks, in order of execution."""
        for operation in self.candidate.operations:
            for number in operation.outputs:
                mask = self.of_candidate.masks[number]
                few = mask and mask.bit_count() <= _MOST_BLOCKS and number in self.live[1]
                useful = few and self.values[number].dtype.kind == "f" and not self._is_view(operation)
                if useful and not self._lacks_bias(number):
                    yield number

    def _lacks_bias(self, number: int) -> bool:
        """Whether a value is a product to which a bias is then added: without it, it would suit fewer sources."""
        masks = self.of_candidate.masks
        added = [operation for operation in self.users.get(number, []) if "add" in operation.name]
        counts = [masks[operation.outputs[0]].bit_count() for operation in added]
        return len(added) == len(self.users.get(number, [])) > 0 and set(counts) == {masks[number].bit_count() + 1}

    def compare(self, exact: bool, tier: int) -> bool:
        """Find choices of this tier with which a value is equal to one of the reference's, or else close to it."""
        self.evaluations = 0
        return any(self._attempt(number, exact, tier) for number in islice(self.pending(), _WINDOW))

    def _is_view(self, operation: Operation) -> bool:
        """Whether an operation only arranges a value that was looked at before it."""
        if id(operation) not in self.views:
            one, other = self.values[operation.inputs[0]], self.values[operation.outputs[0]]
            same = len(operation.inputs) == 1 and one.size == other.size and operation.inputs[0] in self.live[1]
            ordered = [np.sort(array, axis=None) for array in (one, other)] if same else []
            self.views[id(operation)] = same and bool(np.array_equal(*ordered, equal_nan=True))
        return self.views[id(operation)]

    def _attempt(self, number: int, exact: bool, tier: int) -> bool:
        """Try the choices for the blocks behind a value; whether fewer options are left."""
        keys = self._matter(number)
        groups = [group for group in self.groups if not keys.isdisjoint(group[0])]
        single = tuple(key for key in sorted(keys) if not any(key in group[0] for group in groups))
        if not keys or len(single) > _MOST_SINGLE or (tier and not single) or self.evaluations > _MOST_EVALUATIONS:
            return False
        pools = self._pools(self.values[number].size, len(single)) if single else [()]
        state = number, exact, tier, frozenset(keys), tuple(map(len, groups)), tuple(pools)
        if state in self.failed:
            return False
        sources = tuple(dict.fromkeys(source for pool in pools for source in pool))
        verified: list[Choice] = []
        for i, pool in enumerate(pools):
            if verified and len(pool) > max(len(single), len(pools[i - 1])):
                break
            choices = islice(self._choices(single, groups, pool, tier), _MOST_TRIES if exact else _MOST_CLOSE)
            accepts = self._equal if exact else self._close
            accepted = [choice for choice in self._in_time(choices) if accepts(number, choice)]
            summed = (other for choice in accepted for other in self._summed(choice, single, sources))
            verified += accepted + [choice for choice in self._in_time(summed) if accepts(number, choice)]
            if self.deadline.is_over:  # choices that were not tried might be equal too
                return False
        if verified and self._narrow(groups, verified, bool(single)):
            return True
        self.failed.add(state)
        return False

    def _in_time(self, choices: Iterator[Choice]) -> Iterator[Choice]:
        return takewhile(lambda choice: not self.deadline.is_over, choices)

    def _matter(self, number: int) -> set[str]:
        """The undecided blocks that change a value; those multiplied by zero do not."""
        state = number, self.of_candidate.masks[number]
        if state not in self.mattering:
            self.mattering[state] = self._changing(number)
        return self.mattering[state]

    def _changing(self, number: int) -> set[str]:
        keys = self.of_candidate.keys(self.of_candidate.masks[number])
        base = self.evaluate(number, {})
        matter = set()
        for key in keys:
            other = self.evaluate(number, {key: self.random.uniform(0.5, 1.5, self.open[key].shape)})
            if base is None or other is None or not np.array_equal(base, other, equal_nan=True):
                matter.add(key)
        if len(matter) < len(keys) and base is not None:
            self.of_candidate.known[number] = sum(self.of_candidate.bits[key] for key in matter)
            self.of_candidate.masks[number] = self.of_candidate.known[number]
            if not matter:
                self.values[number] = base
        return matter

    def _pools(self, size: int, count: int) -> list[tuple[str, ...]]:
        """Sets of undecided sources that one of the reference's values of this size depends on, the smallest first."""
        masks = self.of_reference.masks
        masks_of_size = {masks[n] for n in self.reference.by_size.get(size, (0, []))[1] if n in self.live[0]}
        few = sorted((m for m in masks_of_size if m and m.bit_count() <= count + 2), key=lambda m: (m.bit_count(), m))
        shared = tuple(sorted(self.shared)) if count < 3 else ()
        pools = [self.of_reference.keys(mask) for mask in few]
        return pools + ([shared] if shared else [])

    def _choices(
        self, single: Sequence[str], groups: Sequence[list[Choice]], pool: Sequence[str], tier: int
    ) -> Iterator[Choice]:
        """Joint choices of this tier that use no element of a source twice."""
        shapes = {key: self.arrays[key].shape for key in pool}
        always = [set.intersection(*map(_used, group)) for group in groups]  # used by each option of a group
        taken = set().union(*always).difference(self.shared)
        options = [
            [g for g in self._guesses(key, shapes, tier) if not (taken.intersection(g.sources) and self._is_whole(g))]
            for key in single
        ]
        merged = ({key: guess for part in joint for key, guess in part.items()} for joint in product(*groups))
        joints = [choice for choice in merged if self._distinct(choice.values())]
        for tiers in product(range(tier + 1), repeat=len(single)):
            if sum(tiers) != tier:
                continue
            plain = [[g for g in own if g.tier == t] for own, t in zip(options, tiers, strict=True)]
            for guess in islice(filter(_of_one_part, product(*plain)), _MOST_TRIES):
                if not self._zeros_are_biases(single, guess) or not self._distinct(guess):
                    continue
                for joint in joints:
                    choice = {**dict(zip(single, guess, strict=True)), **joint}
                    if self._distinct(choice.values()):
                        yield choice

    def _zeros_are_biases(self, single: Sequence[str], guess: Sequence[Guess]) -> bool:
        """Whether blocks that are guessed to be 0 are smaller than one that is not."""
        sizes = [(bool(g.source), prod(self.open[key].shape)) for key, g in zip(single, guess, strict=True)]
        largest = max((size for sourced, size in sizes if sourced), default=0)
        return all(sourced or size < largest for sourced, size in sizes)

    def _summed(self, choice: Choice, single: Sequence[str], pool: Sequence[str]) -> Iterator[Choice]:
        """The choice with a second bias added: two biases of the reference may follow each other."""
        used = {source for guess in choice.values() for source in guess.sources}
        for key in single:
            guess = choice[key]
            for other in pool if guess.source else ():
                if len(self.arrays[other].shape) == 1 and self.arrays[other].shape == self.arrays[guess.source].shape:
                    summed = replace(guess, added_to=other)
                    if other not in used and not guess.added_to and self.is_free(summed):
                        yield {**choice, key: summed}

    def _guesses(self, key: str, shapes: Mapping[str, tuple[int, ...]], tier: int) -> list[Guess]:
        return [g for g in guesses(self.open[key].shape, shapes) if g.tier <= tier and self.is_free(g)]

    def _is_whole(self, guess: Guess) -> bool:
        return all(self.arrays[key].size == prod(guess.layout.shape) for key in guess.sources)

    def _distinct(self, chosen: Iterable[Guess]) -> bool:
        """Whether no element of a source is used twice."""
        used: dict[str, list[Layout]] = {}
        for guess in chosen:
            for key in guess.sources:
                used.setdefault(key, []).append(guess.layout)
        several = (own for key, own in used.items() if key not in self.shared)
        return not any(_overlap(one, other) for own in several for one, other in combinations(own, 2))

    def _with(self, number: int, choice: Choice) -> Array | None:
        arrays = {key: guess.value(self.arrays, self.open[key].shape) for key, guess in choice.items()}
        return self.evaluate(number, arrays)

    def _equal(self, number: int, choice: Choice) -> bool:
        value = self._with(number, choice)
        return value is not None and self._partner(value) is not None

    def _partner(self, value: Array) -> int | None:
        """The first of the reference's values that is equal and depends on inputs."""
        one = signature(value)
        if one is None:
            return None
        return next((n for n in self.reference.partners(one, value, BOUND) if n in self.live[0]), None)

    def _close(self, number: int, choice: Choice) -> bool:
        value = self._with(number, choice)
        used = {key for guess in choice.values() for key in guess.sources}
        mask = sum(bit for key, bit in self.of_reference.bits.items() if key in used)
        nearest = self._nearest(value, mask) if value is not None else None
        return nearest is not None

    def _nearest(self, value: Array, mask: int) -> Array | None:
        """The closest of the reference's values that depend on these sources alone, in the shape of `value`."""
        best, closest = _CLOSE, None
        one = signature(value)
        if one is None:
            return None
        for number in self.reference.by_size.get(value.size, (0, []))[1]:
            near = self.of_reference.masks[number] == mask and number in self.live[0]
            if near and _error(one.ordered, self.reference.by_number[number].ordered) < _CLOSE:
                for target in alignments(self.reference.value(number), value):
                    error = _error(value, target)
                    if error < best:
                        best, closest = error, target
        return closest

    def _narrow(self, groups: Sequence[list[Choice]], verified: list[Choice], new: bool) -> bool:
        """Keep the verified choices; whether that decides anything."""
        verified = list({frozenset(choice.items()): choice for choice in verified}.values())
        count = int(np.prod([len(group) for group in groups]))
        if not new and len(verified) >= count:
            return False
        self.groups = [group for group in self.groups if not any(group is other for other in groups)]
        if len(verified) == 1:
            self.decide(verified[0])
        else:
            self.groups.append(verified)
        return True

    def decide(self, choice: Choice) -> None:
        """Set blocks, and everything that is then known."""
        pending = [choice]
        while pending:
            for key, guess in pending.pop().items():
                self.set_block(key, guess)
            left = [[o for o in map(self._rest, group) if o is not None] for group in self.groups]
            pending += [options[0] for options in left if len(options) == 1]
            self.groups = [options for options in left if len(options) > 1]
        self.settle()

    def _rest(self, choice: Choice) -> Choice | None:
        """What a choice says about undecided blocks; None if it contradicts the decided ones."""
        rest = {key: guess for key, guess in choice.items() if key in self.open}
        agrees = all(self.decided[key][1] == guess for key, guess in choice.items() if key not in rest)
        return rest if agrees and all(map(self.is_free, rest.values())) else None

    def snap(self) -> bool:
        """Replace a known value that the reference does not have, but nearly, by the reference's."""
        masks = self.of_candidate.masks
        for operation in self.candidate.operations:
            if any(masks[n] for n in operation.outputs):
                for number in operation.inputs:
                    if not masks[number] and number in self.live[1] and self._snap(number):
                        return True
        return False

    def _snap(self, number: int) -> bool:
        value = self.values[number]
        if number in self.pinned or value.dtype.kind != "f" or number not in self.producers:
            return False
        if signature(value) is None or self._partner(value) is not None:
            return False
        target = self._nearest(value, 0)
        if target is None:
            return False
        self.pinned.add(number)
        self.replace_value(number, target)
        return True

    def split(self) -> bool:
        """Split a block of which a value depends on a part alone."""
        for number in islice(self.pending(), _WINDOW):
            if self.deadline.is_over:
                return False
            if not any(word in step.name for step in self.path(number) for word in _LOOKUPS):
                for key in sorted(self._matter(number)):
                    if not any(key in group[0] for group in self.groups) and self._split(number, key):
                        return True
        return False

    def _split(self, number: int, key: str) -> bool:
        block = self.open[key]
        for axis, size in enumerate(block.shape):
            low, high = self._range(number, key, axis)
            if (low, high) != (0, size):
                del self.open[key]
                start = block.region[axis].start
                for a, b in ((0, low), (low, high), (high, size)):
                    if a < b:
                        region = (*block.region[:axis], slice(start + a, start + b), *block.region[axis + 1 :])
                        part = Block(block.name, block.row, region, block.numbers)
                        self.open[part.key] = part
                self.of_candidate.known.clear()
                self.of_candidate.update(self.open)
                return True
        return False

    def _range(self, number: int, key: str, axis: int) -> tuple[int, int]:
        """The first and last index along an axis that change a value; found by halving."""
        block = self.open[key]
        size = block.shape[axis]
        base = self.evaluate(number, {})
        current = self.values[block.numbers[0]][block.region]
        other = self.random.uniform(0.5, 1.5, block.shape)

        def matters(start: int, stop: int) -> bool:
            inside = (np.arange(size) >= start) & (np.arange(size) < stop)
            where = inside.reshape([-1 if i == axis else 1 for i in range(len(block.shape))])
            value = self.evaluate(number, {key: np.where(where, other, current)})
            return base is None or value is None or not np.array_equal(base, value, equal_nan=True)

        low, high = 0, size
        step = _first(size, lambda n: matters(0, n + 1))
        low = step
        high = _first(size, lambda n: not matters(n, size)) if low < size else size
        return (low, high) if low < high else (0, size)


def _of_one_part(chosen: Sequence[Guess]) -> bool:
    """Whether kernel and bias are the same part of packed parameters, such as the same gate."""
    return len({guess.part for guess in chosen if guess.part}) < 2


def _error(value: Array, target: Array) -> float:
    """Root mean square of the difference, relative to the target's."""
    if value.shape != target.shape:  # some are infinite
        return float("inf")
    return float(np.sqrt(np.square(target - value).mean() / np.square(target).mean()))


def _first(size: int, holds: Callable[[int], bool]) -> int:
    """The first n below size for which a condition holds from then on; size if none."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _used(choice: Choice) -> set[str]:
    return {key for guess in choice.values() for key in guess.sources}


@lru_cache(maxsize=2**14)  # the same pairs return in many choices
def _overlap(one: Layout, other: Layout) -> bool:
    """Whether two arrangements of a source have an element in common."""
    used = np.zeros(one.source_size, bool)
    used[elements(one)] = True
    return bool(used[elements(other)].any())
