"""Decoding settings of a Hugging Face directory, as `transformers`' `generate` applies them by default."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...backend.errors import ConfigError, ConversionError
from ...configs.decoding import DecodingConfig, SamplingConfig
from ...configs.schema import TransformerConfig
from ..checkpoint import CONFIG, GENERATION

Settings = Mapping[str, Any]

# setting -> values that change nothing; other values cannot be applied
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False, True),
    "num_return_sequences": (1,),
    "repetition_penalty": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
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
# diverse beam search, whose settings belong together
_GROUPS = {"num_beam_groups": "beam_groups", "diversity_penalty": "diversity_penalty"}
# the filters of sampling: field of `SamplingConfig` with the same value -> default of `generate`
_FILTERS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
_NO_FILTERS = {"top_h": (), "epsilon_cutoff": (0, 0.0), "eta_cutoff": (0, 0.0)}
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
# defaults of `generate`: of an unset beam size, and of an unset maximum length
_BEAM_SIZE, _NEW_TOKENS = 1, 20


class Generation(NamedTuple):
    """What a directory sets: fields of `DecodingConfig`, and the settings that they come from."""

    file: str  # config.json or generation_config.json
    fields: dict[str, Any]
    settings: dict[str, Any]
    defaults: dict[str, Any]  # of `transformers`, for what the file does not set

    def __str__(self) -> str:
        groups = {self.file: self.settings, f"not in {self.file}, the defaults of transformers": self.defaults}
        texts = {origin: ", ".join(f"{name}={value}" for name, value in own.items()) for origin, own in groups.items()}
        return "; ".join(f"{text} ({origin})" for origin, text in texts.items() if text)


def generation_of(documents: Mapping[str, Settings], model: TransformerConfig, name: str) -> Generation | None:
    """The decoding settings of a directory's documents, with the defaults of `generate`; None without a directory.

    Raises:
        ConversionError: lists every setting that twinax cannot apply.
    """
    if CONFIG not in documents:
        return None
    file = _file_of(documents)
    settings = {name: value for name, value in documents[file].items() if value is not None}
    if problems := [*_problems(settings), *_other_ids(settings, model, file)]:
        raise ConversionError(
            f"{name}: {file} sets {', '.join(problems)}, which twinax cannot apply; change the file, or pass "
            "--ignore-generation-config"
        )
    samples = settings.get("do_sample", False)
    names = (
        *_SAME,
        *_GROUPS,
        *_LENGTHS,
        "bad_words_ids",
        "suppress_tokens",
        *(("do_sample", *_FILTERS) if samples else ()),
    )
    stated = {name: settings[name] for name in names if name in settings}
    defaults = {} if "num_beams" in settings else {"num_beams": _BEAM_SIZE}
    defaults |= {"max_new_tokens": _NEW_TOKENS} if _lacks_length(settings) else {}
    defaults |= {"top_k": _FILTERS["top_k"]} if samples and "top_k" not in settings else {}
    settings |= defaults
    fields = {field: settings[name] for name, field in (_SAME | _GROUPS).items() if name in settings}
    words = settings.get("bad_words_ids", [])
    ids = [*(word[0] for word in words if len(word) == 1), *settings.get("suppress_tokens", [])]
    sequences = tuple(tuple(word) for word in words if len(word) > 1)
    fields |= {"forbidden_sequences": sequences} if sequences else {}
    fields |= _lengths(settings, model)
    if samples:
        fields["sampling"] = SamplingConfig(**{name: settings.get(name, value) for name, value in _FILTERS.items()})
        fields["early_stopping"] = False  # there is one hypothesis
    fields["forbidden_ids"] = tuple(i for i in ids if i != model.eos_id)
    # `generate` forbids padding only if it is listed, and ends a sentence at the maximum only if a token is forced
    fields |= {"allow_padding": model.pad_id not in ids, "force_end": model.forced_eos_id is not None}
    return Generation(file, fields, stated, defaults)


def decoding_with(settings: Settings, fields: Settings) -> DecodingConfig:
    """Fields of a directory with some changed: a beam size takes the place of sampling, and sampling that of a beam.

    Raises:
        ConfigError: a field has an invalid value.
    """
    one_group = {"beam_groups": 1, "diversity_penalty": 0.0}
    if fields.get("sampling") is not None:
        settings = {**settings, **one_group, "beam_size": 1, "early_stopping": False}
    elif "beam_size" in fields:
        settings = {**settings, **one_group, "sampling": None}
    return DecodingConfig(**{**settings, **fields})


def decoding_document(documents: Mapping[str, Settings]) -> dict[str, Settings]:
    """The generation_config.json with the decoding settings of a directory, for another family; {} without one."""
    if CONFIG not in documents:
        return {}
    names = (*_NEUTRAL, *_SAME, *_GROUPS, *_FILTERS, *_NO_FILTERS, *_LENGTHS, "bad_words_ids", "suppress_tokens")
    settings = documents[_file_of(documents)]
    return {GENERATION: {name: settings[name] for name in names if settings.get(name) is not None}}


def end_ids(documents: Mapping[str, Settings], model: TransformerConfig) -> dict[str, Any]:
    """The ids that end a translation in generation_config.json, unless the model has had another EOS since."""
    stated = documents.get(GENERATION, {}).get("eos_token_id")
    first = documents.get(CONFIG, {}).get("eos_token_id", model.eos_id)
    return {} if stated is None or first not in (model.eos_id, [model.eos_id]) else {"eos_token_id": stated}


def longest_translation(documents: Mapping[str, Settings], model: TransformerConfig) -> int | None:
    """The largest length of a translation that a directory sets, else that of `generate`; None without a directory."""
    if CONFIG not in documents:
        return None
    settings = {name: value for name, value in documents[_file_of(documents)].items() if type(value) is int}
    return _lengths({"max_new_tokens": _NEW_TOKENS} if _lacks_length(settings) else settings, model)["max_length"]


def _file_of(documents: Mapping[str, Settings]) -> str:
    return GENERATION if GENERATION in documents else CONFIG


def _lacks_length(settings: Settings) -> bool:
    return not {"max_length", "max_new_tokens"} & {*settings}


def _problems(settings: Settings) -> Iterator[str]:
    """Each setting that twinax cannot apply, with its value."""
    samples = settings.get("do_sample", False)
    for name, values in (_NEUTRAL | (_NO_FILTERS if samples else {})).items():
        if name in settings and settings[name] not in values:
            yield f"{name}={settings[name]!r}"
    for name, field in _SAME.items():
        if name in settings and name != "early_stopping" and not _is_valid(field, settings[name]):
            yield f"{name}={settings[name]!r}"
    for name in _FILTERS if samples else ():
        if name in settings and not _is_valid(name, settings[name], SamplingConfig):
            yield f"{name}={settings[name]!r}"
    if not _are_groups(settings):
        yield ", ".join(f"{name}={settings[name]!r}" for name in ("num_beams", *_GROUPS) if name in settings)
    if samples and settings.get("num_beams", 1) != 1:
        yield f"num_beams={settings['num_beams']!r} with do_sample=True"
    for name in _LENGTHS:
        if name in settings and type(settings[name]) is not int:
            yield f"{name}={settings[name]!r}"
    if type(settings.get("early_stopping", False)) is not bool:
        yield f"early_stopping={settings['early_stopping']!r}"
    if not _are_ids(settings.get("suppress_tokens", [])):
        yield f"suppress_tokens={settings['suppress_tokens']!r}"
    words = settings.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(_are_ids(ids) and ids for ids in words):
        yield f"bad_words_ids={words!r}"


def _other_ids(settings: Settings, model: TransformerConfig, file: str) -> Iterator[str]:
    """The ids with which `generate` would begin or end a translation otherwise than the model's config states."""
    end = settings.get("eos_token_id", model.eos_id)
    if end not in (model.eos_id, [model.eos_id]):
        yield f"eos_token_id={end!r} (the model's is {model.eos_id})"
    bos = settings.get("bos_token_id")
    if file == GENERATION and "decoder_start_token_id" not in settings and bos not in (None, model.decoder_start_id):
        yield f"bos_token_id={bos!r} without decoder_start_token_id (the model's is {model.decoder_start_id})"


def _are_groups(settings: Settings) -> bool:
    """Whether the settings of diverse beam search fit together."""
    names = {"num_beams": "beam_size", **_GROUPS}
    try:
        DecodingConfig(**{field: settings[name] for name, field in names.items() if name in settings})
    except ConfigError:
        return not {*_GROUPS} & {*settings}  # the beam size is reported elsewhere
    return True


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_valid(field: str, value: Any, config: type[DecodingConfig | SamplingConfig] = DecodingConfig) -> bool:
    try:
        config(**{field: value})
    except ConfigError:
        return False
    return True


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
