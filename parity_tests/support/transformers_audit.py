"""Encoder-decoders of `transformers`, small and with random weights; and the reasons for the questions they fail."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from parity_tests.support.defects import CACHE, CAUSAL, CAUSAL_TRAINING, GRADIENTS, PADDING, SAME, STILL, TARGET_PADDING
from twinax.audit.audit_report import Answer, Audit
from twinax.parity.oracles.transformers import randomize

# Reduced values of config fields, applied to nested configs too.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size"), 31),
    "tgt_vocab_size": 29,
    **dict.fromkeys(("d_model", "hidden_size", "cross_attention_hidden_size"), 16),
    **dict.fromkeys(("d_kv", "head_dim"), 8),
    **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size"), 12),
    **dict.fromkeys(("encoder_layers", "num_layers", "num_encoder_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads", "num_heads", "num_key_value_heads"), 2),
    "max_position_embeddings": 40,
    "max_encoder_position_embeddings": 40,
    "max_decoder_position_embeddings": 40,
    # Windows and blocks are shorter than the audit's sentences, so that attention is local.
    **dict.fromkeys(("attention_window", "sliding_window"), 4),
    **dict.fromkeys(("local_radius", "global_block_size", "num_global_tokens"), 2),
    "num_random_blocks": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    # Every second layer has experts, whose capacity is below the tokens per sentence.
    "num_experts": 4,
    "expert_capacity": 4,
    **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 2),
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 1),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The meaning of block_size depends on the class.
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "BigBirdPegasusForConditionalGeneration": {"block_size": 1},  # block-sparse from 8 tokens on
    "MarianMTModel": {"decoder_vocab_size": 29, "share_encoder_decoder_embeddings": False},
    "PegasusXForConditionalGeneration": {"block_size": 4},
}


class Explanation(NamedTuple):
    """Why a model fails a question."""

    reason: str
    measured: str = ""  # required prefix of the measurement, if it shows that the reason covers all of it


_PROPHETNET = (
    "`get_predict_relative_pos_embeddings` orders its biases by position, stream and head, and its buckets by stream, "
    "head and position: a position gets the bias of another one, which depends on the target's length"
)
EXPLAINED: dict[tuple[str, str], Explanation] = {
    ("BigBirdPegasusForConditionalGeneration", PADDING): Explanation(
        "every token attends to the last block, which is padding in a padded sentence"
    ),
    ("BigBirdPegasusForConditionalGeneration", SAME): Explanation(
        "training draws the random blocks, evaluation takes the first block for all of them"
    ),
    ("BigBirdPegasusForConditionalGeneration", STILL): Explanation(
        "a source of at most 5 + 2 `num_random_blocks` blocks switches the model to full attention, and it stays there",
        "after a call with a shorter source",
    ),
    ("EncoderDecoderModel", GRADIENTS): Explanation(
        "BERT's pooler is built and its output is not used", "2 of 101 tensors get no gradient: encoder.pooler.dense"
    ),
    ("LEDForConditionalGeneration", GRADIENTS): Explanation(
        "the projections of global attention serve the tokens of a `global_attention_mask`, and none was given",
        "12 of 103 tensors get no gradient",
    ),
    ("NllbMoeForConditionalGeneration", GRADIENTS): Explanation(
        "`NllbMoeExperts` reads the 0 and 1 of the router's mask as expert indices: only the first two are used",
        "16 of 115 tensors get no gradient",
    ),
    **{
        ("ProphetNetForConditionalGeneration", question): Explanation(_PROPHETNET)
        for question in (CAUSAL, CAUSAL_TRAINING, TARGET_PADDING, CACHE)
    },
    ("SwitchTransformersForConditionalGeneration", CACHE): Explanation(
        "an expert drops the tokens of a call beyond `expert_capacity`; a cached call has one token"
    ),
    ("T5Gemma2ForConditionalGeneration", GRADIENTS): Explanation(
        "the tensors for images, 48 of them the vision tower's: no image was given", "51 of 106 tensors get no gradient"
    ),
}
if Version(transformers.__version__) < Version("5.23"):
    EXPLAINED["LEDForConditionalGeneration", STILL] = Explanation(
        "the encoder's LayerDrop draws a number per layer in evaluation too, and drops none",
        "random numbers are drawn in led.encoder",
    )


def architectures() -> tuple[list[Any], list[Any]]:
    """(text-to-text classes, classes of the mapping that are excluded because no encoder reads text)."""
    classes: list[Any] = [*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.values()]
    text_classes = [c for c in classes if _config(c).is_encoder_decoder and "text" in c.input_modalities]
    return text_classes, [c for c in classes if c not in text_classes]


def _config(architecture: Any) -> Any:
    """The default config: before `transformers` 5.20, `EncoderDecoderModel` has none, and from it on two BERTs."""
    if getattr(architecture.config_class, "has_no_defaults_at_init", False):
        return architecture.config_class.from_encoder_decoder_configs(
            transformers.BertConfig(), transformers.BertConfig()
        )
    return architecture.config_class()


def small_model(architecture: Any, **settings: Any) -> Any:
    """A small model with random weights, from the reduced default config; `settings` override config fields."""
    config = _config(architecture)
    _reduce(config)
    for name, value in (_OWN_SIZES.get(architecture.__name__, {}) | settings).items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = architecture(config)
    randomize(model)
    return model


def _reduce(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _reduce(value)
        elif name in _SIZES and value is not None:
            setattr(config, name, _SIZES[name])


def complaints(report: Audit) -> Iterator[str]:
    """Yields the failures missing from `EXPLAINED`, and its entries that the audit no longer finds."""
    failures = {answer.question: answer for answer in report.findings}
    for answer in failures.values():
        if explanation(report, answer) is None:
            yield f"{report.name}: {answer.question} No: {answer.measured}. It is not in EXPLAINED"
    for name, question in EXPLAINED:
        if name == report.name and question not in failures:
            yield f"{name}: {question} Yes. Remove it from EXPLAINED"


def explanation(report: Audit, answer: Answer) -> str | None:
    """The reason why a model fails a question, or None if `EXPLAINED` does not cover the measurement."""
    entry = EXPLAINED.get((report.name, answer.question))
    return entry.reason if entry and answer.measured.startswith(entry.measured) else None
