"""Padding of sentences of different lengths to one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

Ids = Sequence[int] | np.ndarray


def pad(
    sentences: Sequence[Ids] | np.ndarray, pad_id: int, width: int | None = None, dtype: DTypeLike = np.int32
) -> np.ndarray:
    """The (B, L) ids of B sentences, padded at the end; L is `width`, or the longest sentence's length."""
    width = max(map(len, sentences)) if width is None else width
    padded = np.full((len(sentences), width), pad_id, dtype)
    for row, ids in zip(padded, sentences, strict=True):
        row[: len(ids)] = ids
    return padded


def round_up(length: int, multiple: int, longest: int) -> int:
    """The length rounded up to a multiple, at most `longest`, so that few lengths are compiled."""
    return min(-(-length // multiple) * multiple, longest)
