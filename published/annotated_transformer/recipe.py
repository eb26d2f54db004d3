"""annotated_transformer: harvardnlp's Annotated Transformer.

Its mistakes concern training, not the model. Its dropout of attention weights ignores the setting; the config cannot
express this, because it has one rate per dropout site.
"""

from dataclasses import replace
from typing import Any

from ...configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from ...configs.decoding import DecodingConfig
from ...configs.run import LoopConfig, RunConfig
from ...configs.schema import TransformerConfig
from ...configs.training import TrainingConfig
from ..recipe import Recipe

_MODEL = TransformerConfig(
    src_vocab_size=10_000,
    tgt_vocab_size=10_000,
    max_length=5000,
    norm_placement="pre",
    norm="sample_std_norm",
    norm_eps=1e-6,
    final_norm=True,
    output_activation="log_softmax",
    mask_value=-1e9,
    decoder_mask="causal_and_padding",
    attention_dropout=0.1,
    ffn_dropout=0.1,
    linear_init="xavier_uniform_torch_bias",
    embedding_init="xavier_uniform",
    pad_id=2,
    bos_id=0,
    eos_id=1,
    decoder_start_id=0,
)


_TRAINING = TrainingConfig(
    label_smoothing=0.1,
    smoothing="others_but_padding",
    schedule="noam_per_part",
    warmup_updates=3000,
    first_update=0,
    accumulation=10,
    reduction="parts",
)

_TRAINING_REPAIRS: dict[str, Any] = {"schedule": "noam", "first_update": 1, "reduction": "tokens"}

_BREAKS: dict[str, str] = {
    "reduction": "the step: gradients of the parts are summed, and updates come after parts 1, 11, 21",
    "schedule": "the schedule: it counts micro-batches, so warm-up is ten times shorter in updates",
}

_TOKENIZER = TokenizerConfig(
    kind="word",
    joint=False,
    languages=("de", "en"),  # pre-tokenized by spaCy
    normalization="none",
    special_order=("bos", "eos", "pad", "unk"),
    pad_token="<blank>",
    min_frequency=2,
    source_bos=True,
)

_DECODING_FIELDS: dict[str, Any] = {"decoder_mask": "causal"}

# The published loop does not stop at EOS, but at a fixed length.
_DECODING: DecodingConfig | None = DecodingConfig(force_end=False, allow_padding=True)


def _run(as_published: bool) -> RunConfig:
    """Multi30k, eight epochs; an update has ten parts, each with the tokens of about 32 sentences."""
    return RunConfig(
        corpus=CorpusConfig(dataset="bentrevett/multi30k", src_column="de", tgt_column="en", valid_split="validation"),
        tokenizer=replace(_TOKENIZER, vocab_size=30_000),
        batches=BatchConfig(tokens=5120, max_src_length=72, max_tgt_length=72),
        model=TransformerConfig.published("annotated_transformer", as_published=as_published),
        training=TrainingConfig.published("annotated_transformer", as_published=as_published),
        loop=LoopConfig(epochs=8),
    )


RECIPE = Recipe(
    model=_MODEL,
    repairs={},
    breaks=_BREAKS,
    training=_TRAINING,
    training_repairs=_TRAINING_REPAIRS,
    tokenizer=_TOKENIZER,
    run=_run,
    decoding=_DECODING,
    decoding_fields=_DECODING_FIELDS,
)
