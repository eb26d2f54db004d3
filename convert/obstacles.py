"""The reasons why directories of other families cannot be read, by the model_type of their config.json."""

from collections.abc import Mapping
from typing import Any

_EXPERTS = "feed-forward layers that are mixtures of experts"
_LOCAL = "attention that is restricted to blocks or windows"
_ROTARY = "rotary positions"
_SPEECH = "a source of speech"
_UNWRITTEN = "(the layout is not written; docs/conversion.md says how to add one)"

# Encoder-decoders of `transformers` -> what twinax does not support
OBSTACLES = {
    "longt5": _LOCAL,
    "switch_transformers": _EXPERTS,
    "t5gemma": _ROTARY,
    "t5gemma2": _ROTARY,
    "led": _LOCAL,
    "bigbird_pegasus": _LOCAL,
    "pegasus_x": _LOCAL,
    "prophetnet": "relative positions and the prediction of several tokens at once",
    "nllb-moe": _EXPERTS,
    "blenderbot-small": "a decoder that adds positions after the norm of its embeddings",
    "seamless_m4t": _SPEECH,
    "seamless_m4t_v2": _SPEECH,
    "speech_to_text": _SPEECH,
    "whisper": _SPEECH,
    "encoder-decoder": "an encoder and a decoder of two families",
    "speech-encoder-decoder": _SPEECH,
    "vision-encoder-decoder": "a source of images",
    "mvp": f"the prompts of MVP {_UNWRITTEN}",
    "fsmt": f"the names of FSMT {_UNWRITTEN}",
    "plbart": f"the names of PLBart {_UNWRITTEN}",
}


def obstacle(settings: Mapping[str, Any]) -> str:
    """The reason why a model of these settings cannot be read, as the end of a sentence that starts with model_type."""
    model_type, architectures = settings.get("model_type"), settings.get("architectures")
    if isinstance(model_type, str) and model_type in OBSTACLES:
        return f"cannot be read, because twinax does not support {OBSTACLES[model_type]}"
    if settings.get("is_encoder_decoder") is True or model_type is None:
        return "is not a family that twinax supports"
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    decodes = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    kind = "a decoder-only model" if decodes else "not an encoder-decoder"
    return f"is {kind}{f' ({names[0]})' if names else ''}; twinax supports encoder-decoders only"
