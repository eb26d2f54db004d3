"""Decoding settings of a Hugging Face directory, as `transformers`' `generate` applies them by default."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..configs.errors import ConversionError
from ..configs.schema import TransformerConfig
from .checkpoint import CONFIG, GENERATION

Settings = Mapping[str, Any]

# setting -> values that change nothing; other values cannot be applied
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "num_return_sequences": (1,),
    "num_beam_groups": (1,),
    "repetition_penalty": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "penalty_alpha": (0, 0.0),
    "begin_suppress_tokens": ([],),
    "exponential_decay_length_penalty": (),
    "forced_decoder_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "sequence_bias": (),
    "stop_strings": (),
    "watermarking_config": (),
    "dola_layers": (),
}
# setting -> field of `DecodingConfig` with the same value
_SAME = {
    "num_beams": "beam_size",
    "length_penalty": "length_exponent",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "renormalize_logits": "renormalize",
    "early_stopping": "early_stopping",
}
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")


class Generation(NamedTuple):
    """What a directory sets: fields of `DecodingConfig`, and the settings that they come from."""

    file: str  # config.json or generation_config.json
    fields: dict[str, Any]
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"{', '.join(f'{name}={value}' for name, value in self.settings.items())} ({self.file})"


def generation_of(documents: Mapping[str, Settings], model: TransformerConfig, name: str) -> Generation | None:
    """The decoding settings of a directory's documents; None if there is no directory, or it sets none.

    Raises:
        ConversionError: lists every setting that beam search cannot apply.
    """
    if CONFIG not in documents:
        return None
    file = GENERATION if GENERATION in documents else CONFIG
    settings = {name: value for name, value in documents[file].items() if value is not None}
    if problems := [*_problems(settings)]:
        raise ConversionError(
            f"{name}: {file} sets {', '.join(problems)}, which beam search cannot apply; change the file, or pass "
            "--ignore-generation-config"
        )
    names = (*_SAME, *_LENGTHS, "bad_words_ids", "suppress_tokens")
    stated = {name: settings[name] for name in names if name in settings}
    if not stated:
        return None
    fields = {field: settings[name] for name, field in _SAME.items() if name in settings}
    ids = [*(ids[0] for ids in settings.get("bad_words_ids", [])), *settings.get("suppress_tokens", [])]
    fields |= _lengths(settings, model)
    fields["forbidden_ids"] = tuple(i for i in ids if i != model.eos_id)
    # `generate` forbids padding only if it is listed, and ends a sentence at the maximum only if a token is forced
    fields |= {"allow_padding": model.pad_id not in ids, "force_end": model.forced_eos_id is not None}
    return Generation(file, fields, stated)


def _problems(settings: Settings) -> Iterator[str]:
    """Each setting that beam search cannot apply, with its value."""
    for name, values in _NEUTRAL.items():
        if name in settings and settings[name] not in values:
            yield f"{name}={settings[name]!r}"
    for name in _LENGTHS:
        if name in settings and type(settings[name]) is not int:
            yield f"{name}={settings[name]!r}"
    if type(settings.get("early_stopping", False)) is not bool:
        yield f"early_stopping={settings['early_stopping']!r}"
    if isinstance(settings.get("eos_token_id"), list):
        yield f"eos_token_id={settings['eos_token_id']!r}"
    lists = {"bad_words_ids": settings.get("bad_words_ids", [])}
    lists["suppress_tokens"] = [[token] for token in settings.get("suppress_tokens", [])]
    for name, values in lists.items():
        if not all(isinstance(ids, list) and len(ids) == 1 and type(ids[0]) is int for ids in values):
            yield f"{name}={settings[name]!r} (only single tokens can be forbidden)"


def _lengths(settings: Settings, model: TransformerConfig) -> dict[str, int]:
    """Bounds as in `DecodingConfig`; `generate` counts the start token in max_length and min_length."""
    lengths = {}
    if "max_new_tokens" in settings or "max_length" in settings:
        longest = settings.get("max_new_tokens", settings.get("max_length", 1) - 1)
        lengths["max_length"] = max(min(longest, model.max_length), 1)
    if "min_new_tokens" in settings or "min_length" in settings:
        shortest = settings["min_new_tokens"] + 1 if "min_new_tokens" in settings else settings["min_length"]
        lengths["min_length"] = max(shortest, 1)
    return lengths
