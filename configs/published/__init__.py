"""The five published systems as configs: what their code computes, how it trains and decodes, and what repairs it.

Vocabularies come from a corpus; where nothing is said they have 10,000 tokens, or the 30,000 that leftover allows.
"""

from dataclasses import replace
from typing import Any

from ..data import TokenizerConfig
from ..decoding import DecodingConfig
from ..run import RunConfig
from ..schema import TransformerConfig
from ..training import TrainingConfig
from ..validation import ConfigError
from . import annotated_transformer, d2l_note, jadore801120, leftover, lucky_glass

_SYSTEMS = {
    "lucky_glass": lucky_glass,
    "jadore801120": jadore801120,
    "leftover": leftover,
    "d2l_note": d2l_note,
    "annotated_transformer": annotated_transformer,
}
AS_PUBLISHED: dict[str, TransformerConfig] = {name: system.AS_PUBLISHED for name, system in _SYSTEMS.items()}
REPAIRS: dict[str, dict[str, Any]] = {name: system.REPAIRS for name, system in _SYSTEMS.items()}
TRAINING: dict[str, TrainingConfig] = {name: system.TRAINING for name, system in _SYSTEMS.items()}
TOKENIZER: dict[str, TokenizerConfig] = {name: system.TOKENIZER for name, system in _SYSTEMS.items()}
TRAINING_REPAIRS: dict[str, dict[str, Any]] = {name: system.TRAINING_REPAIRS for name, system in _SYSTEMS.items()}
BREAKS: dict[str, dict[str, str]] = {name: system.BREAKS for name, system in _SYSTEMS.items()}


def recipe(name: str, *, as_published: bool) -> RunConfig:
    """A system's whole training: its data, tokens, model, optimiser, schedule and length.

    Raises:
        ConfigError: there is no such system.
    """
    if name not in _SYSTEMS:
        raise ConfigError(f"published={name!r}: there is no such system; choose one of {', '.join(_SYSTEMS)}")
    return _SYSTEMS[name].recipe(as_published)


def as_decoded(name: str, model: TransformerConfig, *, as_published: bool) -> tuple[TransformerConfig, DecodingConfig]:
    """(a system's model as its own decoding computes it, that decoding).

    The decoder does not mask padding that it generated. jadore801120's beam search omits the scale of the logits unless
    repaired. `max_length` counts generated tokens: leftover's own limit includes the start token, so it is one lower.

    Raises:
        ConfigError: there is no such system, it has published no decoding, or no such model.
    """
    system = _SYSTEMS.get(name)
    how = system and system.DECODING
    if system is None or how is None:
        known = ", ".join(known for known, other in _SYSTEMS.items() if other.DECODING is not None)
        raise ConfigError(f"published={name!r}: has no decoding of its own; choose one of {known}")
    wrongly: dict[str, Any] = getattr(system, "DECODED_WRONGLY", {}) if as_published else {}
    changed = model.replace(**system.DECODED_AS | wrongly)
    longest = min(how.max_length or model.max_length, model.max_length) - getattr(system, "START_TOKENS_COUNTED", 0)
    return changed, replace(how, max_length=longest)
