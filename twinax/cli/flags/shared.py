"""Flags that several commands share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import tyro

CheckpointPath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
JsonFile = Annotated[str | None, tyro.conf.arg(name="json")]
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Framework = Literal["flax", "torch"]
Quantization = Literal["int8"]
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def flags(kind: type[T]) -> type[T]:
    """Make a class of flags a frozen dataclass, with each description on one line.

    For shell completion, bash would take a second line for a flag.
    """
    kind.__doc__ = re.sub(r"\n {12}", " ", kind.__doc__ or "")
    return dataclass(frozen=True, kw_only=True)(kind)


@flags
class Languages:
    """The languages of a multilingual model.

    Attributes:
        src_lang: language of the source in a multilingual model: deu_Latn (NLLB), de (M2M100), de_DE (mBART).
        tgt_lang: language of the translations; Marian's too, such as fra for >>fra<<.
        forced_bos: first token of every translation, or its id.
    """

    src_lang: str | None = None
    tgt_lang: str | None = None
    forced_bos: str | None = None

    @property
    def languages(self) -> dict[str, str | None]:
        """The values by name."""
        return {name: getattr(self, name) for name in ("src_lang", "tgt_lang", "forced_bos")}


@flags
class Decoding:
    """The settings of beam search.

    Attributes:
        beam_size: beam size; 1 is greedy decoding, the fastest. Default: the Hugging Face directory's (1 if
            it sets none), else 5.
        length_exponent: scores are sums of log-probabilities divided by length to this power. Default: the
            directory's, else 1.
        max_length: maximum length of a translation in tokens, including EOS; default: the directory's (20 if it sets
            none), else the model's maximum. A poorly trained model repeats itself up to this length.
        min_length_ratio: minimum length of a translation in tokens per token of the source; default: 0.
        max_length_ratio: maximum length of a translation in tokens per token of the source; default: none.
        no_repeat_ngram_size: n-grams of this size occur once per translation; 0: no rule. Default: the directory's.
        beam_groups: groups of the beam that avoid each other's tokens (diverse beam search). Default: the directory's,
            else 1.
        diversity_penalty: nats that a token loses for each hypothesis of an earlier group that has just taken it.
        ignore_generation_config: ignore the directory's settings, such as num_beams and bad_words_ids.
    """

    beam_size: int | None = None
    length_exponent: float | None = None
    max_length: int | None = None
    min_length_ratio: float | None = None
    max_length_ratio: float | None = None
    no_repeat_ngram_size: int | None = None
    beam_groups: int | None = None
    diversity_penalty: float | None = None
    ignore_generation_config: Switch = False

    @property
    def decoding(self) -> Mapping[str, Any]:
        """The values by name; None is the directory's, or the default."""
        return {name: getattr(self, name) for name in _DECODING}


_DECODING = (
    *("beam_size", "length_exponent", "max_length", "min_length_ratio", "max_length_ratio", "no_repeat_ngram_size"),
    *("beam_groups", "diversity_penalty"),
)


@flags
class Sampling:
    """Samples from the model's distribution instead of beam search, if one of these is given.

    Attributes:
        samples: translations to draw per line; default: 1.
        seed: seed of the draws; with the number of a line, it determines the samples. Default: 0.
        temperature: divides the logits; below 1, probable tokens become more probable.
        top_k: keep the k most probable tokens.
        top_p: keep the most probable tokens up to this probability (nucleus sampling).
        min_p: keep tokens at least this share as probable as the best.
        typical_p: keep the most typical tokens up to this probability (locally typical sampling).
        mbr: of the samples, take the one with the highest mean chrf or bleu against all of them, which becomes its
            score (minimum Bayes risk).
    """

    samples: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    mbr: Literal["chrf", "bleu"] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The given values by name."""
        return {field: value for field in _SAMPLING if (value := getattr(self, field)) is not None}


_SAMPLING = ("samples", "seed", "temperature", "top_k", "top_p", "min_p", "typical_p")
