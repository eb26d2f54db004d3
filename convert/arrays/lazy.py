"""Arrays by name that are computed when they are read, so that one of them is in memory at a time."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 24  # bytes that are compared at once


class Spec(NamedTuple):
    """The required shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class LazyArrays(Mapping[str, np.ndarray]):
    """Arrays of known shapes and dtypes; each is computed anew whenever it is read."""

    def __init__(self, specs: Mapping[str, Spec], compute: Callable[[str], np.ndarray]):
        self.specs = specs
        self._compute = compute

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.specs:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def select(self, names: Collection[str]) -> "LazyArrays":
        """The arrays with these names."""
        return LazyArrays({name: self.specs[name] for name in names}, self._compute)

    def with_prefix(self, prefix: str) -> "LazyArrays":
        """The arrays with a prefix before their names."""
        specs = {prefix + name: spec for name, spec in self.specs.items()}
        return LazyArrays(specs, lambda name: self._compute(name.removeprefix(prefix)))

    def __or__(self, other: Mapping[str, np.ndarray]) -> "LazyArrays":
        """The union; a name in both is the other's."""
        specs = {**self.specs, **specs_of(other)}
        return LazyArrays(specs, lambda name: other[name] if name in other else self._compute(name))


def lazy(arrays: Mapping[str, np.ndarray]) -> LazyArrays:
    """Existing arrays as lazy ones."""
    return arrays if isinstance(arrays, LazyArrays) else LazyArrays(specs_of(arrays), arrays.__getitem__)


def specs_of(arrays: Mapping[str, np.ndarray]) -> Mapping[str, Spec]:
    """Shapes and dtypes by name; computes no array."""
    if isinstance(arrays, LazyArrays):
        return arrays.specs
    return {name: Spec(tuple(a.shape), str(a.dtype)) for name, a in arrays.items()}


def contiguous_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order; copies it only if it is in another order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays have equal shapes, dtypes and bytes, NaN included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.T.flags.c_contiguous and right.T.flags.c_contiguous:  # as stored; a transposition would copy both
        left, right = left.T, right.T
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (left, right))
    return all(np.array_equal(a[i : i + _CHUNK], b[i : i + _CHUNK]) for i in range(0, a.size, _CHUNK))
