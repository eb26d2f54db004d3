"""The settings of beam search and of sampling.

n is the length of a hypothesis in tokens: EOS counts, the start token does not. K is the beam size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..backend.errors import ConfigError
from .validation import check_field_types

LengthPenalty = Literal["power", "power_with_start", "gnmt"]
Ended = Literal["leave", "stay"]

BEAM_SIZE = 5  # default of the commands, if neither a flag nor the directory sets it


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Filters of the distribution that tokens are drawn from, applied in this order, each to what the last one left.

    The logits are divided by `temperature`. `top_k` keeps the k most probable tokens. `top_p` keeps a token if those
    that are more probable have less than p together (Holtzman et al. 2020). `min_p` keeps a token whose probability is
    at least this share of the largest (Nguyen et al. 2024). `typical_p` keeps a token if those whose information
    -log q is closer to the entropy of q have less than p together (Meister et al. 2023). Of tokens with equal values
    all are kept or none. The filters never remove the most probable token, or with `typical_p` the most typical one.

    Raises:
        ConfigError: a field has an invalid value; names field, value and what is allowed.
    """

    seed: int = 0  # with the number of a sentence, of a sample and of a token, it determines every draw
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # 1: all tokens
    min_p: float = 0.0  # 0: all tokens
    typical_p: float = 1.0  # 1: all tokens

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: must be 0 to 2^32 - 1")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature}: must be above 0; beam_size=1 without sampling is greedy"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: must be at least 0; 0 keeps all tokens")
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0 and at most 1; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p}: must be 0 to 1; 0 keeps all tokens")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Beam search as in `transformers`' `generate`; a beam size of 1 is greedy search.

    Each step considers the 2K best continuations. One that emits EOS is finished if it ranks among the first K, with
    the score (sum of log-probabilities) / penalty(n). The K best unfinished continuations are the next beam. A sentence
    is finished when each of its K finished hypotheses scores at least as high as the best unfinished one at its
    current length; with `early_stopping`, as soon as it has K finished hypotheses.

    With `ended="stay"` the K best continuations are the next beam, finished or not. A sentence is finished when all K
    hypotheses contain EOS. They rank by the sum of log-probabilities of all their tokens, including those after EOS,
    over penalty(n) at the first EOS. If `max_length` is reached earlier, they rank by the sums.

    With `beam_groups` G > 1 the beam is divided into G groups of K / G, one after the other at each step, each with a
    search of its own (diverse beam search, Vijayakumar et al. 2018). The log-probability of a token is reduced by
    `diversity_penalty` for each hypothesis of the groups before, unless they are finished, that has just taken it. All
    finished hypotheses are then ranked together.

    With `sampling` there is no search: the K hypotheses of a sentence are independent samples, in the order in which
    they are numbered. Their scores are those of the search, by the model's distribution before the filters.

    Raises:
        ConfigError: a field has an invalid value; names field, value and what is allowed.
    """

    beam_size: int = 1
    n_best: int = 1  # hypotheses to return per sentence
    length_penalty: LengthPenalty = "power"  # power: n^a; power_with_start: (n + 1)^a; gnmt: ((5 + n) / 6)^a
    length_exponent: float = 1.0  # a; 0: scores are sums of log-probabilities
    min_length: int = 1  # smallest n; 1 allows the empty translation
    max_length: int | None = None  # largest n; None: the model's max_length
    min_length_ratio: float = 0.0  # smallest n per token of the source, EOS included on both sides
    max_length_ratio: float | None = None  # largest n per token of the source; None: no bound
    force_end: bool = True  # whether EOS is forced at max_length; False: unfinished hypotheses are truncated there
    forbidden_ids: tuple[int, ...] = ()  # tokens that are never generated
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are never generated
    allow_padding: bool = False  # whether padding may be generated
    no_repeat_ngram_size: int = 0  # n-grams of this size occur once per hypothesis, with the start token; 0: no rule
    encoder_no_repeat_ngram_size: int = 0  # n-grams of this size in the source are not generated; 0: no rule
    renormalize: bool = False  # whether the log-probabilities of the allowed tokens are normalized again
    early_stopping: bool = False  # whether a sentence is finished as soon as it has K finished hypotheses
    ended: Ended = "leave"  # whether finished hypotheses leave the beam or stay in it
    beam_groups: int = 1  # G; groups of the beam that avoid each other's tokens
    diversity_penalty: float = 0.0  # nats per hypothesis of an earlier group with the same token at the same place
    sampling: SamplingConfig | None = None  # whether tokens are drawn; None: beam search
    log_linear: bool = False  # whether an ensemble averages log-probabilities instead of probabilities
    cache: bool | None = None  # key-value cache; None: on if it does not change the outputs

    def __post_init__(self) -> None:
        if not isinstance(self.forbidden_ids, Iterable):
            raise ConfigError(f"forbidden_ids={self.forbidden_ids!r}: must be whole numbers")
        ids = (token.item() if isinstance(token, np.integer) else token for token in self.forbidden_ids)
        object.__setattr__(self, "forbidden_ids", tuple(ids))
        if isinstance(self.forbidden_sequences, list):
            object.__setattr__(self, "forbidden_sequences", tuple(map(tuple, self.forbidden_sequences)))
        check_field_types(self)
        if not all(self.forbidden_sequences):
            raise ConfigError("forbidden_sequences: one is empty; omit it")
        least, most = self.min_length_ratio, self.max_length_ratio
        if not 0 <= least < math.inf:
            raise ConfigError(f"min_length_ratio={least!r}: must be at least 0")
        if most is not None and not max(least, 1e-9) <= most < math.inf:
            raise ConfigError(f"max_length_ratio={most!r}: must be above 0, and at least min_length_ratio={least}")
        for name in ("beam_size", "n_best", "min_length", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r}: must be at least 1")
        for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least 0")
        if self.beam_groups < 1 or self.beam_size % self.beam_groups:
            raise ConfigError(f"beam_groups={self.beam_groups}: must divide beam_size={self.beam_size}")
        if not 0 <= self.diversity_penalty < math.inf:
            raise ConfigError(f"diversity_penalty={self.diversity_penalty!r}: must be at least 0")
        if (self.beam_groups == 1) != (self.diversity_penalty == 0):
            raise ConfigError(
                f"diversity_penalty={self.diversity_penalty}, beam_groups={self.beam_groups}: set both, or neither"
            )
        if self.beam_groups > 1 and (self.sampling is not None or self.ended != "leave"):
            raise ConfigError(f"beam_groups={self.beam_groups}: needs ended='leave', without sampling")
        if self.sampling is not None and (self.early_stopping or self.ended != "leave"):
            raise ConfigError("sampling: needs early_stopping=False and ended='leave'; samples do not compete")
        if self.early_stopping and self.ended == "stay":
            raise ConfigError("early_stopping=True: needs ended='leave'; finished hypotheses that stay are not counted")
        if self.n_best > self.beam_size:
            raise ConfigError(f"n_best={self.n_best}: must not be above beam_size={self.beam_size}")
        if self.max_length is not None and self.min_length > self.max_length:
            raise ConfigError(f"min_length={self.min_length}: must not be above max_length={self.max_length}")
        if not -math.inf < self.length_exponent < math.inf:
            raise ConfigError(f"length_exponent={self.length_exponent!r}: must be a finite number")

    def without_seed(self) -> "DecodingConfig":
        """The same for any seed: what a compiled program depends on."""
        return self if self.sampling is None else replace(self, sampling=replace(self.sampling, seed=0))
