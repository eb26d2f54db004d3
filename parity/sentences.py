"""Batches of real sentences for the ladder."""

from collections.abc import Callable, Sequence

import numpy as np

from ..configs.schema import TransformerConfig
from ..formulas.padding import pad, round_up
from .functions import Batch
from .ladder import TEXT_SENTENCES

_STEP = 16  # lengths are rounded up to multiples of it: each is compiled once


def draw_from(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], config: TransformerConfig
) -> Callable[[int, int], Batch | None]:
    """f(number, sentences): the batch of a number, in their order; no pair twice, and None at the end.

    Targets are without the start and the end; what is longer than the model takes is cut there. Number 0 has
    TEXT_SENTENCES, or as many as there are.
    """
    start, end = config.decoder_start_id or 0, config.max_length - 1
    cut = ((tuple(s[: config.max_length]), tuple(t[:end])) for s, t in zip(sources, targets, strict=True))
    pairs = list(dict.fromkeys(cut))

    def draw(number: int, sentences: int) -> Batch | None:
        first = TEXT_SENTENCES + (number - 1) * sentences if number else 0
        chosen = pairs[first : first + sentences]
        if len(chosen) < (sentences if number else 1):
            return None
        sides = [s for s, _ in chosen], [(start, *t) for _, t in chosen], [(*t, config.eos_id) for _, t in chosen]
        longest = [round_up(max(map(len, side)), _STEP, config.max_length) for side in sides]
        if config.cross_mask == "encoder":  # which needs both sides of one length
            longest = [max(longest)] * 3
        src, tgt, labels = (
            pad(side, config.pad_id, length, np.int64) for side, length in zip(sides, longest, strict=True)
        )
        return Batch(src, tgt, labels)

    return draw
