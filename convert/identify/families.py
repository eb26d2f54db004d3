"""The reasons why models of other families cannot be read, by their config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .unreadable import COMPARE, Unsupported, printable

_ADD = "docs/families.md says how to add a family"


class _Family(NamedTuple):
    reason: str  # what twinax does not support
    settings: tuple[str, ...] = ()  # the settings that say so; a dot leads into a nested one
    advice: str = COMPARE


_EXPERTS = _Family("mixture-of-experts layers", ("num_experts",))
_LOCAL = "local attention, over blocks or windows"

# Model types of text models of `transformers` -> what twinax does not support; of others, config.json says enough
UNSUPPORTED = {
    "longt5": _Family(_LOCAL, ("encoder_attention_type", "local_radius")),
    "led": _Family(_LOCAL, ("attention_window",)),
    "bigbird_pegasus": _Family(_LOCAL, ("attention_type", "block_size")),
    "pegasus_x": _Family(_LOCAL, ("block_size",)),
    "switch_transformers": _EXPERTS,
    "nllb-moe": _EXPERTS,
    "t5gemma": _Family("rotary positions", ("encoder.rope_parameters", "encoder.sliding_window")),
    "t5gemma2": _Family("rotary positions", ("encoder.text_config.rope_parameters",)),
    "prophetnet": _Family("relative positions and the prediction of several tokens at once", ("ngram",)),
    "blenderbot-small": _Family("a decoder that adds positions after the norm of its embeddings"),
    "encoder-decoder": _Family(
        "an encoder and a decoder of two families", ("encoder.model_type", "decoder.model_type")
    ),
    "rag": _Family("a retriever between source and generator", ("generator.model_type", "n_docs")),
    "mvp": _Family("MVP's prompts and tensor names", ("use_prompt", "prompt_length"), _ADD),
    "fsmt": _Family("FSMT's tensor names", ("langs",), f"pass the fairseq .pt, or {_ADD}"),
    "plbart": _Family("PLBart's tensor names", advice=_ADD),
}


def unsupported_settings(settings: Mapping[str, Any], supported: tuple[str, ...]) -> Unsupported | None:
    """The obstacle in a config.json, None if it is a family of `supported` model types."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in supported:
        return _unsupported_family(settings, supported)
    quantization = settings.get("quantization_config")
    if quantization:
        return _quantized(model_type, quantization)
    return None


def _unsupported_family(settings: Mapping[str, Any], supported: tuple[str, ...]) -> Unsupported:
    model_type = settings.get("model_type")
    name, families = f"model_type={printable(repr(model_type))}", f"supported: {', '.join(supported)}"
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        family = UNSUPPORTED[model_type]
        values = ", ".join(_values(settings, family.settings))
        reason = f"twinax does not support {family.reason}{f' ({values})' if values else ''}"
        return Unsupported(f"a Hugging Face model of {name}", reason, family.advice)
    if model_type is None:
        kind = "a directory whose config.json is not of a Hugging Face model"
        return Unsupported(kind, f"config.json has no model_type; {families}", "copy the config.json of the model")
    if settings.get("is_encoder_decoder") is True:
        hint = f"{COMPARE}; {_ADD}"
        return Unsupported(f"a Hugging Face model of {name}", f"not a family that twinax supports; {families}", hint)
    kind, architecture = _architecture(settings)
    reason = f"{name}{f', architectures={architecture!r}' if architecture else ''}, and twinax reads encoder-decoders"
    return Unsupported(kind, f"{reason} of text only; {families}", COMPARE)


def _architecture(settings: Mapping[str, Any]) -> tuple[str, str | None]:
    """(what a model is that is no encoder-decoder, the name of its class)."""
    names = settings.get("architectures")
    name = next((printable(name) for name in names if isinstance(name, str)), None) if isinstance(names, list) else None
    if name and name.endswith(("ForCausalLM", "LMHeadModel")):
        return "a decoder-only model", name
    if name and name.endswith(("ForMaskedLM", "ForPreTraining")):
        return "an encoder-only model", name
    return "not an encoder-decoder of text", name


def _quantized(model_type: str, quantization: Any) -> Unsupported:
    names = ("quant_method", "load_in_4bit", "load_in_8bit", "bits")
    values = {n: quantization[n] for n in names if quantization.get(n)} if isinstance(quantization, Mapping) else {}
    reason = ", ".join(f"quantization_config.{name}={printable(repr(value))}" for name, value in values.items())
    return Unsupported(
        f"a quantized Hugging Face model of model_type={model_type!r}",
        reason or f"quantization_config={printable(quantization)}",
        "pass the original checkpoint, or write one with transformers: "
        "AutoModelForSeq2SeqLM.from_pretrained(DIR).dequantize().save_pretrained(NEW)",
    )


def _values(settings: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """`name=value` of the settings that a config.json has."""
    values = []
    for name in names:
        value: Any = settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            values.append(f"{name}={printable(repr(value))}")
    return values
