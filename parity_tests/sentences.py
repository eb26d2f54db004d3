"""Batches of real sentences for the ladder."""

from collections.abc import Callable, Sequence

import numpy as np

from ..configs.schema import TransformerConfig
from .functions import Batch

_STEP = 16  # lengths are rounded up to multiples of it: each is compiled once


def draw_from(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], config: TransformerConfig, seed: int
) -> Callable[[int, int], Batch | None]:
    """f(number, sentences): the batch of a number, in an order of the seed; no pair twice, and None at the end.

    Targets are without the start and the end; what is longer than the model takes is cut there. The batch of number 0
    may be smaller than asked for.
    """
    start, end = config.decoder_start_id or 0, config.max_length - 1
    pairs = {(tuple(s[: config.max_length]), tuple(t[:end])): None for s, t in zip(sources, targets, strict=True)}
    pairs = list(pairs)
    order = np.random.default_rng(seed).permutation(len(pairs))

    def draw(number: int, sentences: int) -> Batch | None:
        rows = order[number * sentences : (number + 1) * sentences]
        if len(rows) < (sentences if number else 1):
            return None
        chosen = [pairs[i] for i in rows]
        tgt = _pad([(start, *t) for _, t in chosen], config)
        return Batch(_pad([s for s, _ in chosen], config), tgt, _pad([(*t, config.eos_id) for _, t in chosen], config))

    return draw


def _pad(sentences: Sequence[Sequence[int]], config: TransformerConfig) -> np.ndarray:
    longest = max(map(len, sentences))
    padded = np.full((len(sentences), min(-(-longest // _STEP) * _STEP, config.max_length)), config.pad_id)
    for row, ids in zip(padded, sentences, strict=True):
        row[: len(ids)] = ids
    return padded
