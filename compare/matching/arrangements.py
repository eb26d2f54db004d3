"""Finds by values how one array is arranged within another: transposed, reshaped, flipped, sliced."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

Array = np.ndarray
MISSING = np.iinfo(np.int64).min
_GENERIC = 0.7548776662466927  # real and imaginary parts are no rational multiples of it


@dataclass(frozen=True)
class Layout:
    """Element (j1, j2, …) over `axes` is element start + Σ j·stride of the flat source; reshaped to `shape`."""

    start: int
    # (size, stride in the flat source), outermost first; a flip has a negative stride
    axes: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    source_size: int

    def apply(self, source: Array) -> Array:
        """The arranged array."""
        flat = np.ravel(source)
        index = np.full((), self.start)
        for size, stride in self.axes:
            index = index[..., None] + stride * np.arange(size)
        return flat[index].reshape(self.shape)

    @property
    def steps(self) -> tuple[Any, ...]:
        """(sizes, index, order, shape): `source.reshape(sizes)[index].transpose(order).reshape(shape)`.

        An index entry is a number where the source has more than the result, and a slice elsewhere.
        """
        by_stride = sorted(range(len(self.axes)), key=lambda i: -abs(self.axes[i][1]))
        first = self.start + sum((size - 1) * stride for size, stride in self.axes if stride < 0)
        sizes: list[int] = []
        index: list[int | slice] = []
        block = self.source_size
        for i in by_stride:
            size, stride = self.axes[i]
            outer = block // (size * abs(stride))
            block = abs(stride)
            if outer > 1:
                sizes.append(outer)
                index.append(first // (size * block))
                first %= size * block
            sizes.append(size)
            index.append(slice(None, None, -1 if stride < 0 else None))
        if block > 1:
            sizes.append(block)
            index.append(first)
        order = tuple(by_stride.index(i) for i in range(len(self.axes)))
        return tuple(sizes), tuple(index), order, self.shape

    def code(self, name: str, shape: Sequence[int]) -> str:
        """The arrangement of an array with this name and shape as an expression in NumPy."""
        sizes, index, order, _ = self.steps
        parts, current = [name], tuple(shape)
        if not self.axes:
            place = ", ".join(str(int(i)) for i in np.unravel_index(self.start, current))
            return f"{name}[{place}]" + (f".reshape({', '.join(map(str, self.shape))})" if self.shape else "")
        if self.axes == ((self.source_size, 1),):
            sizes = current  # only the final reshape, if any
        if sizes != current and sizes:
            parts.append(f".reshape({', '.join(map(str, sizes))})")
            current = sizes
        if any(entry != slice(None) for entry in index):
            index = list(index)
            while index[-1] == slice(None):
                index.pop()
            parts.append(f"[{', '.join(map(_entry, index))}]")
            current = tuple(n for n, entry in zip(current, self.steps[1], strict=True) if isinstance(entry, slice))
        if order != tuple(range(len(order))):
            two = order == (1, 0)
            parts.append(".T" if two else f".transpose({', '.join(map(str, order))})")
            current = tuple(current[i] for i in order)
        if current != self.shape:
            parts.append(f".reshape({', '.join(map(str, self.shape)) or '()'})")
        return "".join(parts)


def _entry(entry: int | slice) -> str:
    if isinstance(entry, slice):
        return "::-1" if entry.step else ":"
    return str(entry)


def find_layout(index: Array, source_size: int) -> Layout | None:
    """The layout with these flat indices into the source; -1 is unknown. None: it is not an arrangement of axes.

    The index must be a sum of one term per axis, and each term a number in mixed radix: for the axes of a reshape.
    """
    terms: list[Array] = []
    axes: list[tuple[int, int]] = []
    for axis in range(index.ndim):
        term = _term(index, axis)
        digits = _digits(term)
        if digits is None:
            return None
        terms.append(term)
        axes += digits
    usable = index >= 0
    for axis, term in enumerate(terms):
        usable &= (term != MISSING).reshape([-1 if i == axis else 1 for i in range(index.ndim)])
    if not usable.any():
        return None
    place = np.unravel_index(int(usable.argmax()), index.shape)
    start = int(index[place]) - sum(int(term[j]) for term, j in zip(terms, place, strict=True))
    layout = Layout(start, merged([axis for axis in axes if axis[0] > 1]), index.shape, source_size)
    predicted = layout.apply(np.arange(source_size)) if _fits(layout) else None
    return layout if predicted is not None and np.array_equal(predicted[index >= 0], index[index >= 0]) else None


def _fits(layout: Layout) -> bool:
    low = layout.start + sum((size - 1) * stride for size, stride in layout.axes if stride < 0)
    high = layout.start + sum((size - 1) * stride for size, stride in layout.axes if stride > 0)
    return low >= 0 and high < layout.source_size


def _term(index: Array, axis: int) -> Array:
    """What each step along an axis adds to the index; MISSING where no lines lead to the step."""
    lines = np.moveaxis(index, axis, -1).reshape(-1, index.shape[axis])
    full = lines[(lines >= 0).all(1)]
    if len(full):
        return full[0] - full[0][0]
    term = np.full(index.shape[axis], MISSING)
    term[0] = 0
    while _extended(term, lines):
        pass
    return term


def _extended(term: Array, lines: Array) -> bool:
    """Add the steps that a line joins to known ones; whether there were any."""
    before = int((term == MISSING).sum())
    for line in lines:
        reached = term != MISSING
        joined = (line >= 0) & reached
        if reached.all():
            break
        if joined.any():
            first, new = int(joined.argmax()), (line >= 0) & ~reached
            term[new] = term[first] + line[new] - line[first]
    return int((term == MISSING).sum()) < before


def _digits(term: Array) -> list[tuple[int, int]] | None:
    """The (size, stride) of a term in mixed radix, outermost first; None if it is none."""
    digits: list[tuple[int, int]] = []
    rest = term
    while len(rest) > 1:
        known, steps = rest != MISSING, np.arange(len(rest))
        differences, counts = np.unique(np.diff(rest)[known[:-1] & known[1:]], return_counts=True)
        strides = [int(stride) for stride in differences[np.argsort(-counts)][:3] if stride]
        for size, stride in product((n for n in range(len(rest), 1, -1) if len(rest) % n == 0), strides):
            starts = np.where(known, rest - stride * (steps % size), MISSING).reshape(-1, size)
            first = starts.max(1)  # MISSING is the smallest number
            if ((starts == first[:, None]) | (starts == MISSING)).all():
                break
        else:
            return None
        digits.append((size, stride))
        rest = first
    return digits[::-1]


def merged(axes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighboring axes that are one axis of the source."""
    joined: list[tuple[int, int]] = []
    for size, stride in axes:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    return tuple(joined)


def real_numbers(value: Array) -> Array:
    """One real number for each complex one; different numbers have different ones."""
    return np.real(value) + _GENERIC * np.imag(value) if value.dtype.kind == "c" else value
