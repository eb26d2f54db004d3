"""Fixed position tables, computed once in float64 for both frameworks.

Letters: L rows of the table, D d_model, p position (row), i index of a frequency.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Table = Float[np.ndarray, "L D"]


def sinusoidal_interleaved(length: int, d_model: int) -> Table:
    """Interleaved sines and cosines: table[p, 2i] = sin(p / 10000^(2i/D)), table[p, 2i+1] = cos(p / 10000^(2i/D)).

    Source: Vaswani et al. 2017, section 3.5.
    """
    angles = _angles(length, 10_000.0 ** (-2 * np.arange((d_model + 1) // 2) / d_model))
    table = np.empty((length, d_model))
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles[:, : d_model // 2])
    return table


def sinusoidal_half(length: int, d_model: int) -> Table:
    """All sines, then all cosines, with frequencies 10000^(-2i/D). Source: Marian, `transformers`' Marian."""
    angles = _angles(length, 10_000.0 ** (-2 * np.arange((d_model + 1) // 2) / d_model))
    return np.concatenate([np.sin(angles), np.cos(angles[:, : d_model // 2])], axis=1)


def sinusoidal_half_t2t(length: int, d_model: int) -> Table:
    """All sines, then all cosines, with frequencies exp(-i log(10000) / (D/2 - 1)); an odd last column is 0.

    Source: tensor2tensor `get_timing_signal_1d`; fairseq and `transformers`' M2M100.
    """
    half = d_model // 2
    angles = _angles(length, np.exp(-np.arange(half) * np.log(10_000.0) / (half - 1)))
    return np.pad(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), ((0, 0), (0, d_model % 2)))


def _angles(length: int, frequencies: Float[np.ndarray, " F"]) -> Float[np.ndarray, "L F"]:
    return np.arange(length)[:, None] * frequencies


POSITION_TABLES: dict[str, Callable[[int, int], Table]] = {
    "sinusoidal_interleaved": sinusoidal_interleaved,
    "sinusoidal_half": sinusoidal_half,
    "sinusoidal_half_t2t": sinusoidal_half_t2t,
}
