"""How a trained model decodes: the settings of beam search.

n is the length of a hypothesis: its tokens, the end counted, the start not. K is the beam size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .errors import ConfigError
from .validation import check_field_types

LengthPenalty = Literal["power", "power_with_start", "gnmt"]
Ended = Literal["leave", "stay"]


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Beam search, by the rule of `transformers`' `generate` with `early_stopping=False`; a beam of 1 is greedy search.

    At each step the 2K best continuations count. One that ends is finished where it ranks among the first K, with the
    score (sum of log-probabilities) / penalty(n); the K best others go on. A sentence is done when its K finished
    hypotheses are all at least as good as the best that goes on would be at its present length.

    With `ended="stay"` the K best continuations are the next beam, ended or not. A sentence is done when each of the K
    has an end; they rank by the sum of all their tokens, those past the end too, over penalty(n) of the first end.
    Where `max_length` comes before that, they rank by their sums.

    Raises:
        ConfigError: a field has a value that it may not have; names field, value and what is allowed.
    """

    beam_size: int = 1
    n_best: int = 1  # hypotheses to give back for a sentence
    length_penalty: LengthPenalty = "power"  # power: n^a; power_with_start: (n + 1)^a; gnmt: ((5 + n) / 6)^a
    length_exponent: float = 1.0  # a; 0: scores are plain sums
    min_length: int = 1  # smallest n; 1 allows the empty translation
    max_length: int | None = None  # largest n; None: the model's own
    force_end: bool = True  # at max_length; False: what has not ended is cut there
    forbidden_ids: tuple[int, ...] = ()  # never chosen
    allow_padding: bool = False  # whether padding may be chosen
    ended: Ended = "leave"  # what hypotheses that ended do in the beam
    cache: bool | None = None  # keep keys and values of earlier positions; None: where that computes the same

    def __post_init__(self) -> None:
        if not isinstance(self.forbidden_ids, Iterable):
            raise ConfigError(f"forbidden_ids={self.forbidden_ids!r}: must be whole numbers")
        ids = (token.item() if isinstance(token, np.integer) else token for token in self.forbidden_ids)
        object.__setattr__(self, "forbidden_ids", tuple(ids))
        check_field_types(self)
        for name in ("beam_size", "n_best", "min_length", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r}: must be at least 1")
        if self.n_best > self.beam_size:
            raise ConfigError(f"n_best={self.n_best}: must not be above beam_size={self.beam_size}")
        if self.max_length is not None and self.min_length > self.max_length:
            raise ConfigError(f"min_length={self.min_length}: must not be above max_length={self.max_length}")
        if not -math.inf < self.length_exponent < math.inf:
            raise ConfigError(f"length_exponent={self.length_exponent!r}: must be a finite number")
