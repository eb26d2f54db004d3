"""The uniform numbers that samples are drawn with: a hash of where they are used, so that nothing else changes them."""

import numpy as np
from numpy.typing import ArrayLike

from ..configs.decoding import DecodingConfig
from ..configs.schema import TransformerConfig


def draws_of(config: DecodingConfig, model: TransformerConfig, sentences: ArrayLike | None, batch: int) -> np.ndarray:
    """The uniform numbers of a batch: `uniform_numbers`, or none without sampling, (B, K, 0).

    Raises:
        ValueError: there are not as many numbers of sentences as there are sentences.
    """
    if config.sampling is None:
        return np.zeros((batch, config.beam_size, 0), np.float32)
    numbers = np.arange(batch) if sentences is None else np.asarray(sentences, np.int64)
    if numbers.shape != (batch,):
        raise ValueError(f"sentences: has shape {numbers.shape}, and the batch has {batch} sentences")
    return uniform_numbers(config.sampling.seed, numbers, config.beam_size, config.max_length or model.max_length)


def uniform_numbers(seed: int, sentences: np.ndarray, samples: int, longest: int) -> np.ndarray:
    """u in [0, 1) of (seed, sentence, sample, n), shape (B, K, longest n + 1); element 0 is not used.

    They are multiples of 2^-23. A sentence's samples depend neither on its batch nor on how many there are: only the
    seed and the sentence's number change them.

    Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", for random numbers from counters.
    """
    with np.errstate(over="ignore"):
        # digits of pi; any two different words would do
        low, high = np.array(0x243F6A88, np.uint32), np.array(0x85A308D3, np.uint32)
        for word in (
            np.array(seed, np.uint32),
            (sentences & 0xFFFFFFFF).astype(np.uint32)[:, None, None],
            (sentences >> 32).astype(np.uint32)[:, None, None],
            np.arange(samples, dtype=np.uint32)[:, None],
            np.arange(longest + 1, dtype=np.uint32),
        ):
            low, high = _mix(low ^ word), _mix(high + word * np.uint32(0x9E3779B9))
        return (_mix(low ^ high) >> 9).astype(np.float32) / np.float32(2**23)


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix a 32-bit word bijectively: each input bit flips each output bit with probability about 1/2.

    Source: Wellons 2018, "Prospecting for Hash Functions", lowbias32.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
