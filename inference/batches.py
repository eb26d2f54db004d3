"""Sentences in batches of about as many tokens: by length, in a few compiled shapes."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax

from ..configs.schema import TransformerConfig
from ..flax_transformer.decoding.programs import compiled_length

# Tokens of a batch, by its padded source. On a CPU 16 to 64 sentences of 16 tokens decode equally fast, 128 slower.
_TOKENS_ON_CPU = 1024
_TOKENS = 4096
_BYTES = 2 << 30  # of a batch's keys and values at `_LENGTH` positions
_LENGTH = 32
_SMALLEST = 8  # sentences of a batch of several


class Rows(NamedTuple):
    """The sentences of a batch."""

    indices: list[int]
    size: int  # of the batch, which repeats the last sentence

    @property
    def filled(self) -> list[int]:
        """The sentence of each row."""
        return [*self.indices, *[self.indices[-1]] * (self.size - len(self.indices))]


def token_batches(lengths: Sequence[int], config: TransformerConfig, beam_size: int = 1) -> list[Rows]:
    """Batches of the sentences that have a token, the longest first.

    Sizes are powers of 2, but not 2 and 4, so that fewer are compiled.
    """
    position = 8 * config.num_decoder_layers * config.d_model  # bytes of a float32 key and value
    largest = max(_BYTES // (position * _LENGTH * beam_size), 1)
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    tokens = _TOKENS_ON_CPU if jax.default_backend() == "cpu" else _TOKENS
    batches: list[Rows] = []
    start, width, size = 0, 0, 0
    while start < len(order):
        longest = compiled_length(lengths[order[start]], config.max_length)
        if longest != width:  # batches of one length have one size, so that their sentences may join each other
            number = min(max(tokens // longest, 1), largest)
            width, size = longest, min(1 << (number.bit_length() - 1), _size_of(len(order) - start))
        batches.append(Rows(order[start : start + size], size))
        start += size
    return batches


def _size_of(number: int) -> int:
    """The smallest compiled size of at least `number`: 1, 8, 16, 32 and so on."""
    return 1 if number == 1 else max(1 << (number - 1).bit_length(), _SMALLEST)


def decoding_threads() -> int:
    """The number of batches that are decoded at the same time: two on a CPU, of which one batch occupies few cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return 2 if jax.default_backend() == "cpu" and cores > 1 else 1
