"""Beam search of CTranslate2: the arguments of `translate_batch` that make it the search of a `DecodingConfig`.

Source: `src/decoding.cc` of CTranslate2, which stops a sentence at K finished hypotheses, truncates hypotheses at the
maximum length, and applies the softmax after tokens are forbidden.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ...backend.errors import ConfigError
from ...configs.decoding import DecodingConfig
from ...configs.schema import TransformerConfig

# Fields of `DecodingConfig` with the only values that CTranslate2 has, and the reason
_ALLOWED: dict[str, tuple[Any, str]] = {
    "length_penalty": ("power", "CTranslate2 divides by a power of the length"),
    "no_repeat_ngram_size": (0, "CTranslate2 does not count the start token in n-grams"),
    "encoder_no_repeat_ngram_size": (0, "CTranslate2 has no such rule"),
    "renormalize": (True, "CTranslate2 applies the softmax to the allowed tokens only"),
    "ended": ("leave", "finished hypotheses leave the beam of CTranslate2"),
    "force_end": (False, "CTranslate2 truncates hypotheses at the maximum length"),
    "min_length_ratio": (0.0, "the lengths of CTranslate2 do not depend on the source"),
    "max_length_ratio": (None, "the lengths of CTranslate2 do not depend on the source"),
    "beam_groups": (1, "CTranslate2 has no diverse beam search"),
    "sampling": (None, "CTranslate2 draws samples with other random numbers"),
}
# Fields with which all backends search alike
COMMON_RULES: dict[str, Any] = {"renormalize": True, "early_stopping": True, "force_end": False}


def translate_options(model: TransformerConfig, decoding: DecodingConfig, tokens: Sequence[str]) -> dict[str, Any]:
    """The arguments of `translate_batch`, except source and `target_prefix`; `tokens`: the target vocabulary.

    Raises:
        ConfigError: lists every field with a value that the search of CTranslate2 does not have.
    """
    if problems := [*_problems(decoding)]:
        raise ConfigError("CTranslate2 has no such search: " + "; ".join(problems))
    forbidden = dict.fromkeys([*decoding.forbidden_ids, *([] if decoding.allow_padding else [model.pad_id])])
    sequences = [*((i,) for i in forbidden if i != model.eos_id), *decoding.forbidden_sequences]
    return {
        "beam_size": decoding.beam_size,
        "num_hypotheses": decoding.n_best,
        "length_penalty": decoding.length_exponent,
        "max_input_length": 0,
        "max_decoding_length": decoding.max_length or model.max_length,
        "min_decoding_length": decoding.min_length - 1,
        "return_end_token": True,  # or the length of a hypothesis, by which its sum is divided, excludes EOS
        "return_scores": True,
        "suppress_sequences": [[tokens[i] for i in sequence] for sequence in sequences],
    }


def target_prefix(model: TransformerConfig, tokens: Sequence[str]) -> list[str] | None:
    """The tokens with which every translation begins: the forced first one. None: it begins with any."""
    return None if model.forced_bos_id is None else [tokens[model.forced_bos_id]]


def _problems(decoding: DecodingConfig) -> Iterator[str]:
    """Each field with a value that the search of CTranslate2 does not have."""
    for name, (allowed, reason) in _ALLOWED.items():
        if (value := getattr(decoding, name)) != allowed:
            yield f"{name}={value!r}: must be {allowed!r}, because {reason}"
    if not decoding.early_stopping and decoding.beam_size > 1:
        yield "early_stopping=False: must be True, because CTranslate2 stops at beam_size finished hypotheses"
    if decoding.length_exponent == 0 and decoding.n_best > 1:
        yield "length_exponent=0.0: with n_best > 1, CTranslate2 stops at n_best finished hypotheses"
