"""Rotary embeddings that pair neighbors where the reference pairs halves, or the other way round.

Rotating the pairs (2i, 2i + 1) is rotating the pairs (i, i + n/2) of the elements in another order. Both forms are in
use: checkpoints of one need their queries and keys permuted for the other.

Source: Su et al. 2021, "RoFormer", section 3.4.2 (neighbors); GPT-NeoX (halves).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ..capture.trace import Operation
from ..matching.matching import Values
from ..matching.regions import Region
from .edits import Edits, Sides

_NEIGHBORS, _HALVES = "neighbors (2i, 2i + 1)", "halves (i, i + n/2)"


def paired_otherwise(side: Values, region: Region) -> Iterator[tuple[str, Operation, Edits]]:
    """(what to change, operation that takes the pairs apart, edits) for each value that the region may rotate."""
    end = side.value(region.end)
    users: dict[int, Operation] = {}
    for operation in region.operations:
        for number in operation.inputs:
            users.setdefault(number, operation)
    for number, user in users.items():
        value = side.value(number)
        whole = value.size == end.size and value.shape[:-1] == end.shape[: value.ndim - 1]  # the end may be pairs
        if not whole or value.ndim < 2 or value.shape[-1] % 2 or value.dtype.kind != "f":
            continue
        half = value.shape[-1] // 2
        for (own, other), shape in (((_NEIGHBORS, _HALVES), (2, half)), ((_HALVES, _NEIGHBORS), (half, 2))):
            order = np.arange(2 * half).reshape(shape).T.ravel()
            edit = partial(_reordered, number, region.end, region.operations, order)
            yield f"rotates {own}, should rotate {other}", user, ((region.end, edit),)


def _reordered(
    number: int, end: int, operations: Sequence[Operation], order: np.ndarray, sides: Sides
) -> dict[int, np.ndarray]:
    """The end that follows from a value with its last axis in this order, back in the old order."""
    value, old = sides[1].value(number), sides[1].value(end)
    new = sides[1].replay({number: value[..., order]}, operations).get(end, old)
    return {end: new.reshape(value.shape)[..., np.argsort(order)].reshape(old.shape)}
