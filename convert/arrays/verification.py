"""Comparison of a checkpoint with what was read back, one array at a time."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..checkpoint import Checkpoint, add_to_checksum
from ..io.progress import advance
from .frameworks import cast
from .lazy import same_bits, specs_of


class Comparison(NamedTuple):
    """The result of a comparison of two checkpoints' weights."""

    different: list[str]  # names of arrays that are missing, new or not bit-identical
    checksum: str  # SHA-256 of the first one's weights, as `checksum`


def compare_checkpoints(before: Checkpoint, after: Checkpoint) -> Comparison:
    """Compare weights and unused arrays, bit for bit.

    Where a family keeps some arrays of a float16 model in float32, the second checkpoint is in float32 as a whole.
    """
    before, after = (replace(side, training=None) for side in (before, after))
    first, second = before.tensors, after.tensors
    if len({spec.dtype for spec in before.tensors.specs.values()}) > 1:
        first = cast(first, after.config.param_dtype)
    different, digest = sorted(first.keys() ^ second.keys()), hashlib.sha256()
    for name in sorted(first):
        array = first[name]
        if name in second and not same_bits(array, second[name]):
            different.append(name)
        if name in before.arrays:
            add_to_checksum(digest, name, array)
        advance(array.nbytes)
    return Comparison(different, digest.hexdigest())


def number_of(arrays: Mapping[str, np.ndarray]) -> int:
    """The number of numbers in all arrays; computes none of them."""
    return sum(spec.size for spec in specs_of(arrays).values())
