"""Matches the parameters of two models by value, not by name, and finds how each is arranged.

A parameter of the candidate may be an arrangement of one of the reference's, a part of it (packed projections), several
of them together (layers stacked for a scan), one with rows of padding added, or 1 more or less than it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from ..capture.arrays import LARGE, widened
from .arrangements import Layout, find_layout, real_numbers

Array = np.ndarray
UNKNOWN = -1
_SAMPLE = 10_000  # numbers of an array among which one must be unlike all others
_SAMPLED = 512  # numbers of an array whose sources are looked for
_TOLERANCE = 1e-6  # of sums and shifts, which a converter rounds to float32


@dataclass(frozen=True)
class Part:
    """A region of a candidate's parameter that is an arrangement of one of the reference's parameters."""

    region: tuple[slice, ...]
    source: str
    layout: Layout


@dataclass(frozen=True)
class Match:
    """Where a parameter of the candidate comes from."""

    name: str
    parts: tuple[Part, ...]
    shift: int = 0  # what the converter added: -1 where norms store scale - 1
    added_to: str = ""  # a second parameter of the reference, of the same arrangement, whose values are added
    padding: float | None = None  # the value of rows that the reference does not have

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the reference's parameters."""
        return (*dict.fromkeys(part.source for part in self.parts), *([self.added_to] if self.added_to else []))


@dataclass(frozen=True)
class WeightMap:
    """The result: matches, and what values alone do not decide."""

    matches: Mapping[str, Match]
    ambiguous: Mapping[str, tuple[str, ...]]  # constant parameters of the candidate -> possible sources
    unmatched: tuple[str, ...]  # parameters of the candidate with other values than any of the reference
    unused: tuple[str, ...]  # parameters of the reference of which no value is used
    ties: Mapping[str, tuple[str, ...]]  # a parameter of the reference -> others with the same contents

    @property
    def ok(self) -> bool:
        """Whether every parameter of the candidate has its source."""
        return not self.unmatched and not self.ambiguous


class _Values:
    """All values of the reference, for looking up where each occurs."""

    def __init__(self, arrays: Mapping[str, Array]):
        self.names = list(arrays)
        flat = [np.ravel(array).astype(np.float64) for array in arrays.values()]
        values = np.concatenate([*flat, np.zeros(0)])
        owners = np.repeat(np.arange(len(flat)), [len(a) for a in flat])
        places = np.concatenate([*(np.arange(len(a)) for a in flat), np.zeros(0, int)])
        order = np.argsort(values, kind="stable")
        self.values, self.owners, self.places = values[order], owners[order], places[order]
        self.sizes = [len(a) for a in flat]

    def locate(self, array: Array, tolerance: float = 0.0) -> tuple[Array, Array, bool]:
        """(owner, place) of each element, UNKNOWN where its value occurs more than once; whether all occur."""
        slack = tolerance * np.maximum(1, np.abs(array))
        left = np.searchsorted(self.values, array - slack, "left")
        right = np.searchsorted(self.values, array + slack, "right")
        unique, occurs = right - left == 1, right > left
        index = np.where(unique, left, 0)
        owners = np.where(unique, self.owners[index], UNKNOWN)
        return owners, np.where(unique, self.places[index], UNKNOWN), bool(occurs.all())


def match_weights(reference: Mapping[str, Array], candidate: Mapping[str, Array]) -> WeightMap:
    """The map from a reference's parameters to a candidate's, whose values a converter has copied."""
    reference, candidate = ({n: real_numbers(np.asarray(a)) for n, a in s.items()} for s in (reference, candidate))
    distinct, ties = _without_ties(reference)
    sums = _by_sum(distinct)
    matches: dict[str, Match] = {}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for name, array in candidate.items():
        parts = _whole(array, sums.get(_sum(array), ()), distinct) or _stacked(array, sums, distinct)
        if parts:
            matches[name] = Match(name, parts)
    rest = {name: array for name, array in candidate.items() if name not in matches}
    for name, sources in _holders(rest, distinct).items():
        match = _match(name, np.asarray(rest[name], np.float64), distinct, sources)
        if match is not None:
            matches[name] = match
    matches = {name: matches[name] for name in candidate if name in matches}
    used = {source for match in matches.values() for source in match.sources}
    for name, array in rest.items():
        if name not in matches:
            choices = _same_values(array, {n: a for n, a in distinct.items() if n not in used})
            match = _settle(name, array, choices, distinct)
            if match is not None:
                matches[name] = match
            elif choices:
                ambiguous[name] = choices
    used = {source for match in matches.values() for source in match.sources}
    used |= {source for choices in ambiguous.values() for source in choices}
    unmatched = tuple(name for name in candidate if name not in matches and name not in ambiguous)
    return WeightMap(matches, ambiguous, unmatched, tuple(name for name in distinct if name not in used), ties)


def _without_ties(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, tuple[str, ...]]]:
    """(the parameters, one of each group with equal contents that are not constant; the groups)."""
    ties: dict[str, list[str]] = {}
    by_sum: dict[tuple[int, int], list[str]] = {}  # sum -> the first names of groups
    for name, array in arrays.items():
        constant = array.size == 0 or (array == array.flat[0]).all()
        firsts = by_sum.setdefault(_sum(array), [])
        same = (one for one in firsts if not constant and np.array_equal(arrays[one], array))
        first = next(same, name)
        if first == name:
            firsts.append(name)
        ties.setdefault(first, []).append(name)
    distinct = {first: arrays[first] for first in ties}
    return distinct, {first: tuple(names[1:]) for first, names in ties.items() if len(names) > 1}


def _sum(array: Array) -> tuple[int, int]:
    """(size, sum of the numbers' bits): equal for all arrangements of an array."""
    flat = np.ravel(array)
    pieces = (flat[i : i + LARGE].astype(np.float64, copy=False) for i in range(0, flat.size, LARGE))
    return array.size, sum(int(piece.view(np.uint64).sum()) for piece in pieces) % 2**64


def _by_sum(arrays: Mapping[str, Array]) -> dict[tuple[int, int], list[str]]:
    names: dict[tuple[int, int], list[str]] = {}
    for name, array in arrays.items():
        names.setdefault(_sum(array), []).append(name)
    return names


def _whole(array: Array, sources: Sequence[str], reference: Mapping[str, Array]) -> tuple[Part, ...]:
    """The one part by which an array is an arrangement of one of these, without looking at all parameters."""
    if 1 not in np.unique(np.asarray(array.flat[:_SAMPLE], np.float64), return_counts=True)[1]:
        return ()  # such as zeros: nothing tells one from another
    for source in sources:
        other = reference[source]
        region = tuple(slice(0, size) for size in array.shape)
        if np.array_equal(np.ravel(array), np.ravel(other)):
            return (Part(region, source, Layout(0, ((array.size, 1),), array.shape, array.size)),)
        if other.ndim == 2 and np.array_equal(np.ravel(array), np.ravel(other.T)):
            rows, columns = other.shape
            return (Part(region, source, Layout(0, ((columns, 1), (rows, columns)), array.shape, array.size)),)
        parts = _parts(array, {source: other}, _Values({source: other}))
        if len(parts) == 1:
            return parts
    return ()


def _stacked(
    array: Array, sums: Mapping[tuple[int, int], Sequence[str]], reference: Mapping[str, Array]
) -> tuple[Part, ...]:
    """The parts by which an array is a stack of layers along its first axis, without looking at all parameters."""
    parts: list[Part] = []
    for i in range(len(array)) if array.ndim > 1 else ():
        layer = array[i : i + 1]
        found = _whole(layer, sums.get(_sum(layer), ()), reference)
        if not found:
            return ()
        parts.append(replace(found[0], region=(slice(i, i + 1), *found[0].region[1:])))
    return tuple(parts)


def _holders(arrays: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, list[str]]:
    """For each array the reference's parameters in which numbers of a sample of it occur."""
    samples = {name: np.ravel(a)[:: max(a.size // _SAMPLED, 1)].astype(np.float64) for name, a in arrays.items()}
    numbers = np.unique(np.concatenate([*samples.values(), np.zeros(0)]))
    holders: dict[str, list[str]] = {name: [] for name in arrays}
    for source, other in reference.items() if len(numbers) else ():
        flat = np.ravel(other).astype(np.float64, copy=False)
        places = np.minimum(np.searchsorted(numbers, flat), len(numbers) - 1)
        present = np.unique(places[numbers[places] == flat])
        for name, sample in samples.items():
            if np.isin(np.searchsorted(numbers, sample), present).any():
                holders[name].append(source)
    return holders


def _match(name: str, array: Array, reference: Mapping[str, Array], sources: Sequence[str]) -> Match | None:
    """The match of one parameter, the plainest first; `sources` have some of its numbers."""
    values = _Values({source: reference[source] for source in sources})
    for region, padding in ((..., None), *_without_padding(array)) if sources else ():
        parts = _parts(array[region], reference, values)
        if parts:
            return Match(name, parts, padding=padding)
    same = {source: other for source, other in reference.items() if other.size == array.size}
    sums = {source: float(other.sum(dtype=np.float64)) for source, other in same.items()}
    for shift in (-1, 1):
        for source in sums:
            if _near(array, sums[source] + shift * array.size):
                parts = _arranged(array, source, widened(reference[source]) + float(shift))
                if parts:
                    return Match(name, parts, shift=shift)
    for one, other in combinations(sums, 2):
        if reference[one].shape == reference[other].shape and _near(array, sums[one] + sums[other]):
            parts = _arranged(array, one, widened(reference[one]) + widened(reference[other]))
            if parts:
                return Match(name, parts, added_to=other)
    return None


def _near(array: Array, total: float) -> bool:
    """Whether the numbers of an array may have this sum, but for rounding."""
    return bool(np.isclose(array.sum(), total, rtol=1e-4, atol=1e-4 * array.size))


def _arranged(array: Array, source: str, other: Array) -> tuple[Part, ...]:
    """The one part by which an array is an arrangement of another, but for rounding."""
    return _parts(array, {source: other}, _Values({source: other}), _TOLERANCE)


def _parts(array: Array, reference: Mapping[str, Array], values: _Values, tolerance: float = 0.0) -> tuple[Part, ...]:
    """The parts that make up an array; none if some of it is not found, or not arranged by axes."""
    owners, places, complete = values.locate(array, tolerance)
    if not complete or not (owners >= 0).any():
        return ()
    parts = _split(owners, places, tuple(slice(0, size) for size in array.shape), values)
    for part in parts:
        slack = tolerance * np.maximum(1, np.abs(array[part.region]))
        if (np.abs(part.layout.apply(reference[part.source]) - array[part.region]) > slack).any():
            return ()
    return tuple(parts)


def _split(owners: Array, places: Array, region: tuple[slice, ...], values: _Values) -> list[Part]:
    """A region as one part, or else the parts of its blocks along the first axis that separates them; none if none."""
    inside = owners[region]
    known = np.unique(inside[inside >= 0])
    if len(known) == 1:
        layout = find_layout(places[region], values.sizes[known[0]])
        if layout is not None:
            return [Part(region, values.names[known[0]], layout)]
    for axis in range(owners.ndim):
        blocks = _blocks(inside, axis) if len(known) > 1 else _pieces(places[region], axis)
        if len(blocks) > 1:
            start = region[axis].start
            regions = [(*region[:axis], slice(start + a, start + b), *region[axis + 1 :]) for a, b in blocks]
            parts = [_split(owners, places, block, values) for block in regions]
            return [part for some in parts for part in some] if all(parts) else []
    return []


def _blocks(owners: Array, axis: int) -> list[tuple[int, int]]:
    """(start, stop) of blocks along an axis; neighbors have no owner in common."""
    slabs = np.moveaxis(owners, axis, 0).reshape(owners.shape[axis], -1)
    blocks: list[tuple[int, int, set[int]]] = []
    for i, slab in enumerate(slabs):
        names = set(np.unique(slab[slab >= 0]).tolist())
        if blocks and (not names or names & blocks[-1][2]):
            blocks[-1] = blocks[-1][0], i + 1, blocks[-1][2] | names
        else:
            blocks.append((i, i + 1, names))
    return [(start, stop) for start, stop, _ in blocks]


def _pieces(places: Array, axis: int) -> list[tuple[int, int]]:
    """(start, stop) of blocks along an axis between which the places jump; none if they jump often."""
    lines = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    full = lines[(lines >= 0).all(1)]
    if not len(full) or full.shape[1] < 3:
        return []
    steps = np.diff(full[0])
    usual = np.bincount(np.unique(steps, return_inverse=True)[1]).argmax()
    jumps = np.flatnonzero(steps != np.unique(steps)[usual]) + 1
    ends = [0, *jumps.tolist(), full.shape[1]]
    return list(pairwise(ends)) if 0 < len(jumps) <= full.shape[1] // 3 else []


def _without_padding(array: Array) -> Iterator[tuple[tuple[slice, ...], float]]:
    """(region, value) where the last rows along an axis all have one value."""
    for axis in range(array.ndim):
        rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
        if rows.size and len(rows) > 1:
            constant = (rows == rows[-1, 0]).all(1)
            kept = len(rows) - int(np.argmin(constant[::-1]))
            if not constant.all() and kept < len(rows):
                yield tuple(slice(0, kept if i == axis else n) for i, n in enumerate(array.shape)), float(rows[-1, 0])


def _same_values(array: Array, reference: Mapping[str, Array]) -> tuple[str, ...]:
    """The parameters that have the same values as an array, in any order."""
    ordered = np.sort(array, axis=None)
    return tuple(
        name
        for name, other in reference.items()
        if other.size == array.size and np.array_equal(np.sort(other, axis=None), ordered)
    )


def _settle(name: str, array: Array, choices: tuple[str, ...], reference: Mapping[str, Array]) -> Match | None:
    """The match of a parameter whose values do not tell its arrangement, if nothing else is possible."""
    if len(choices) != 1 or array.size == 0 or not (array == array.flat[0]).all():
        return None
    strides = np.cumprod([1, *array.shape[:0:-1]])[::-1]
    axes = tuple((n, int(stride)) for n, stride in zip(array.shape, strides, strict=True) if n > 1)
    layout = Layout(0, axes, array.shape, reference[choices[0]].size)
    return Match(name, (Part(tuple(slice(0, n) for n in array.shape), choices[0], layout),))
