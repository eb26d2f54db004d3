"""Enumerates the plausible ways in which a converter could build an array of one shape from arrays of other shapes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, islice
from math import prod

import numpy as np

from ..matching.arrangements import Layout, merged

Array = np.ndarray
Axes = tuple[tuple[int, int], ...]  # (size, stride) of each axis, as in Layout
_LIMIT = 96  # layouts from one shape to another
_ORDERS = 400  # orders of axes that are enumerated for one region of the source


@dataclass(frozen=True)
class Guess:
    """One way to build a block of a candidate's parameter."""

    source: str  # empty: the block is 0, such as a bias that the reference does not have
    layout: Layout
    tier: int = 0  # each unusual step, such as a sum or a flip, adds one
    added_to: str = ""  # a second source of the same shape, whose values are added
    shift: int = 0
    part: tuple[int, ...] = ()  # (count, outer, number) if it is one of several equal parts of the source
    padding: bool = False  # zeros follow along the first axis that is longer than the layout's

    def value(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
        """The block, of this shape."""
        if not self.source:
            return np.zeros(shape)
        source = arrays[self.source] + (arrays[self.added_to] if self.added_to else 0) + self.shift
        inner = self.layout.apply(source)
        if not self.padding:
            return inner
        padded = np.zeros(shape)
        padded[self.region(shape)] = inner
        return padded

    def region(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Where in the block the layout's array is."""
        sizes = self.layout.shape if self.padding else shape
        return tuple(slice(0, n) for n in sizes)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(source for source in (self.source, self.added_to) if source)


def guesses(shape: tuple[int, ...], sources: Mapping[str, tuple[int, ...]]) -> Iterator[Guess]:
    """The ways to build an array of this shape from sources with these shapes."""
    for name, other in sources.items():
        for tier, layout, part in layouts(other, shape):
            yield Guess(name, layout, tier, part=part)
            if len(shape) == 1 and not part:
                yield from (Guess(name, layout, tier + 1, shift=shift) for shift in (-1, 1))
        yield from _rows(name, other, shape)
    if len(shape) < 3:
        yield Guess("", Layout(0, (), (), 0))
    for one, other in combinations(sources, 2):
        if sources[one] == sources[other] and len(sources[one]) < 3:
            for tier, layout, part in layouts(sources[one], shape):
                yield Guess(one, layout, tier + 1, other, part=part)


@lru_cache(maxsize=4096)
def layouts(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[tuple[int, Layout, tuple[int, ...]], ...]:
    """(tier, layout, part) of the arrangements of a source, or of one of its equal parts, in a target's shape."""
    size, wanted = prod(source), prod(target)
    if not wanted or size % wanted:
        return ()
    entries: dict[Layout, tuple[int, tuple[int, ...]]] = {}
    for tier, start, axes, part in _parts(source, size // wanted):
        for extra in (0, 1) if size == wanted else (0,):
            for order in islice(_orders(axes, target, extra), _ORDERS):
                layout = Layout(start, merged(order), target, size)
                entries.setdefault(layout, (tier + extra, part))
    if len(source) > 2 and size == wanted:
        for layout in [layout for layout, (tier, _) in entries.items() if tier == 0]:
            entries.setdefault(_flipped(layout, prod(source[2:])), (1, ()))
    ordered = sorted(entries.items(), key=lambda entry: (entry[1][0], len(entry[0].axes)))
    return tuple((tier, layout, part) for layout, (tier, part) in ordered[:_LIMIT])


def _strided(shape: Sequence[int]) -> Axes:
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    return tuple((n, int(stride)) for n, stride in zip(shape, strides, strict=True) if n > 1)


def _parts(source: tuple[int, ...], count: int) -> Iterator[tuple[int, int, Axes, tuple[int, ...]]]:
    """(tier, start, axes, part) of each of `count` equal parts: blocks along an axis, or interleaved along it."""
    axes = _strided(source)
    if count == 1:
        yield 0, 0, axes, ()
        return
    for i, (n, stride) in enumerate(axes):
        for outer in _divisors(n // count) if n % count == 0 else ():
            inner = n // count // outer
            rest = tuple((k, s) for k, s in ((outer, stride * count * inner), (inner, stride)) if k > 1)
            for j in range(count):
                tier = int(outer > 1 and len(axes) > 1)
                yield tier, j * inner * stride, (*axes[:i], *rest, *axes[i + 1 :]), (count, outer, j)


def _orders(free: Axes, target: tuple[int, ...], extra: int) -> Iterator[Axes]:
    """Digits of the target's axes, outermost first, that use every axis; `extra`: splits that no shape calls for."""
    target = tuple(n for n in target if n > 1)
    most = max(len(free), len(target)) + extra
    yield from _extended(free, target, (), most)


def _extended(free: Axes, target: tuple[int, ...], digits: Axes, most: int) -> Iterator[Axes]:
    if not target:
        if not free:
            yield digits
        return
    if target[0] == 1:
        yield from _extended(free, target[1:], digits, most)
        return
    if len(digits) + len(free) > most:
        return
    wanted, *others = target
    for i, (n, stride) in enumerate(free):
        rest = free[:i], free[i + 1 :]
        if wanted % n == 0:
            yield from _extended((*rest[0], *rest[1]), (wanted // n, *others), (*digits, (n, stride)), most)
        for d in _divisors(n)[1:-1]:
            if wanted % d == 0:
                for digit, left in (((d, stride * n // d), (n // d, stride)), ((d, stride), (n // d, stride * d))):
                    smaller = (*rest[0], left, *rest[1])
                    yield from _extended(smaller, (wanted // d, *others), (*digits, digit), most)


@lru_cache(maxsize=4096)
def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _flipped(layout: Layout, below: int) -> Layout:
    """The layout with the axes of a convolution's window reversed, whose strides are below this one."""
    start = layout.start + sum((size - 1) * stride for size, stride in layout.axes if stride < below)
    axes = tuple((size, -stride if stride < below else stride) for size, stride in layout.axes)
    return replace(layout, start=start, axes=axes)


def _rows(name: str, source: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Guess]:
    """Guesses with rows left out at either end of the source, or with rows of padding."""
    if len(source) != len(shape) or len(shape) < 2:
        return
    different = [i for i, (n, m) in enumerate(zip(source, shape, strict=True)) if n != m]
    if len(different) != 1:
        return
    axis = different[0]
    surplus = source[axis] - shape[axis]
    axes = _strided(source)
    if surplus < 0:
        yield Guess(name, Layout(0, merged(axes), source, prod(source)), 1, padding=True)
        return
    stride = prod(source[axis + 1 :])
    kept = tuple((m, s) for m, s in zip(shape, np.cumprod([1, *source[:0:-1]])[::-1].tolist(), strict=True) if m > 1)
    for start in (0, surplus * stride):
        yield Guess(name, Layout(start, merged(kept), shape, prod(source)), 1)
