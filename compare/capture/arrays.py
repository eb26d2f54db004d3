"""The arrays of a trace: read as float64, kept in float32 or bfloat16 where that holds every number of a large one."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Self

import numpy as np

LARGE = 2**20  # elements from which on an array is not kept in a wider dtype than it needs
_RECENT = 2**26  # elements of large arrays that stay in float64, because they are often read again: 0.5 GB
_BEGINNING = 64  # elements that show at once that most arrays need float64
_recent: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()  # id -> (array, the same in float64)


@cache
def dtype_of(dtype: Any) -> np.dtype:
    """The dtype in which a value of this dtype is computed: float64 or complex128 for numbers of any width."""
    kind = np.dtype(dtype)
    if kind.kind == "c":
        return np.dtype(np.complex128)
    return kind if kind.kind in "biu" else np.dtype(np.float64)


@cache
def _is_narrow(dtype: np.dtype) -> bool:
    return dtype_of(dtype) != dtype


def is_narrow(array: np.ndarray) -> bool:
    """Whether it has to become wider before anything is computed with it."""
    return _is_narrow(array.dtype)


def widened(array: np.ndarray) -> np.ndarray:
    """The array in the dtype in which it is computed with."""
    if not _is_narrow(array.dtype):
        return array
    if array.size < LARGE:
        return array.astype(dtype_of(array.dtype))
    if id(array) not in _recent:
        _recent[id(array)] = array, array.astype(dtype_of(array.dtype))
    _recent.move_to_end(id(array))
    wide = _recent[id(array)][1]
    while len(_recent) > 1 and sum(one.size for one, _ in _recent.values()) > _RECENT:
        _recent.popitem(last=False)
    return wide


def narrowed(array: np.ndarray) -> np.ndarray:
    """The array in float32 if that holds every number, to the last bit."""
    if array.dtype != np.float64:
        return array
    with np.errstate(all="ignore"):
        narrow = array.astype(np.float32)
    return narrow if np.array_equal(narrow.astype(np.float64).view(np.int64), array.view(np.int64)) else array


class Arrays(list[np.ndarray]):
    """A list of arrays that reads as float64, whatever they are kept in."""

    def append(self, array: np.ndarray) -> None:
        """Add an array; a large one in float32 if that holds it."""
        if array.size >= LARGE and narrowed(array.flat[:_BEGINNING]).dtype != array.dtype:
            array = narrowed(array)
        super().append(array)

    def __getitem__(self, number: int) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        array = super().__getitem__(number)
        return widened(array) if _is_narrow(array.dtype) else array

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(widened, super().__iter__())

    def kept(self, number: int) -> np.ndarray:
        """An array in the dtype in which it is kept."""
        return super().__getitem__(number)

    def kind(self, number: int) -> str:
        """The kind of the dtype in which an array is read."""
        return dtype_of(self.kept(number).dtype).kind

    def with_changes(self, changes: Mapping[int, np.ndarray]) -> Self:
        """The arrays with these in place of others."""
        return type(self)(changes.get(number, self.kept(number)) for number in range(len(self)))
