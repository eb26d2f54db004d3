"""Batches of sentences from a text for the ladder."""

from collections.abc import Callable, Sequence

import numpy as np

from ..configs.schema import TransformerConfig
from ..formulas.padding import pad, round_up
from .functions import Batch
from .ladder import TEXT_SENTENCES

_STEP = 16  # lengths are rounded up to multiples of it, because each length is compiled


def distinct_pairs(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], config: TransformerConfig
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The distinct pairs of ids in order, truncated to the model's `max_length`; targets have no start and no EOS."""
    longest = config.max_length
    truncated = ((tuple(s[:longest]), tuple(t[: longest - 1])) for s, t in zip(sources, targets, strict=True))
    return list(dict.fromkeys(truncated))


def draw_from(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], config: TransformerConfig
) -> Callable[[int, int], Batch | None]:
    """f(number, sentences): the batch with this number, with the pairs in order and no pair twice; None at the end.

    `sources` and `targets` as in `distinct_pairs`. Batch 0 has TEXT_SENTENCES pairs, or all if there are fewer.
    """
    start = config.decoder_start_id or 0
    pairs = distinct_pairs(sources, targets, config)

    def draw(number: int, sentences: int) -> Batch | None:
        first = TEXT_SENTENCES + (number - 1) * sentences if number else 0
        batch_pairs = pairs[first : first + sentences]
        if len(batch_pairs) < (sentences if number else 1):
            return None
        sides = (
            [s for s, _ in batch_pairs],
            [(start, *t) for _, t in batch_pairs],
            [(*t, config.eos_id) for _, t in batch_pairs],
        )
        longest = [round_up(max(map(len, side)), _STEP, config.max_length) for side in sides]
        if config.cross_mask == "encoder":  # requires both sides to have equal lengths
            longest = [max(longest)] * 3
        src, tgt, labels = (
            pad(side, config.pad_id, length, np.int64) for side, length in zip(sides, longest, strict=True)
        )
        return Batch(src, tgt, labels)

    return draw
