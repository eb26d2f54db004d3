"""jadore801120: attention-is-all-you-need-pytorch, with its class's defaults.

Its dropout of attention weights ignores the setting; the config cannot express this, because it has one rate per
dropout site.
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
    head_dim=64,
    v_head_dim=64,
    max_length=200,
    norm_eps=1e-6,
    embedding_norm="after_dropout",
    shared_embeddings=True,
    embedding_scale="none",
    embedding_padding="frozen",
    tied_output=True,
    output_bias="none",
    logit_scale="rsqrt_d_model",
    q_proj_bias=False,
    k_proj_bias=False,
    v_proj_bias=False,
    out_proj_bias=False,
    score_scaling="query",
    mask_value=-1e9,
    decoder_mask="causal_and_padding",
    attention_dropout=0.1,
    linear_init="xavier_uniform_torch_bias",
    embedding_init="xavier_uniform",
    pad_id=1,
    bos_id=2,
    eos_id=3,
    decoder_start_id=2,
)

_REPAIRS: dict[str, Any] = {
    "embedding_norm": "none",
    "max_length": 512,
    "embedding_init": "xavier_uniform_padding_idx",
}

_TRAINING = TrainingConfig(
    label_smoothing=0.1,
    smoothing="others",
    schedule="noam",
    learning_rate=2.0,
    reduction="sum",
)


_BREAKS: dict[str, str] = {
    "embedding_norm": "both inputs: an additional norm after the positions",
    "max_length": "both inputs: sentences of more than 200 tokens fail",
    "embedding_init": "the embedding: Xavier initialization overwrites padding's zero row; the tied output trains it",
}

_TOKENIZER = TokenizerConfig(
    kind="word",
    joint=False,
    languages=("de", "en"),  # pre-tokenized by spaCy
    normalization="none",
    special_order=("unk", "pad", "bos", "eos"),
    pad_token="<blank>",
    min_frequency=3,
    lowercase=True,
    source_bos=True,
)

_DECODING_FIELDS: dict[str, Any] = {"decoder_mask": "causal"}
_DECODING_MISTAKES: dict[str, Any] = {"logit_scale": "none"}

_DECODING: DecodingConfig | None = DecodingConfig(
    beam_size=5,
    length_penalty="power_with_start",
    length_exponent=0.7,
    max_length=99,
    force_end=False,
    allow_padding=True,
    ended="stay",
)


def _run(as_published: bool) -> RunConfig:
    """Multi30k with the flags of its README: one vocabulary, 128,000 warm-up updates, 400 epochs.

    Batches have the tokens of about 256 sentences.
    """
    return RunConfig(
        corpus=CorpusConfig(dataset="bentrevett/multi30k", src_column="de", tgt_column="en", valid_split="validation"),
        tokenizer=replace(_TOKENIZER, joint=True, vocab_size=30_000),
        batches=BatchConfig(tokens=4096, max_src_length=102, max_tgt_length=101),
        model=TransformerConfig.published("jadore801120", as_published=as_published),
        training=replace(TrainingConfig.published("jadore801120", as_published=as_published), warmup_updates=128_000),
        loop=LoopConfig(epochs=400),
    )


RECIPE = Recipe(
    model=_MODEL,
    repairs=_REPAIRS,
    breaks=_BREAKS,
    training=_TRAINING,
    tokenizer=_TOKENIZER,
    run=_run,
    decoding=_DECODING,
    decoding_fields=_DECODING_FIELDS,
    decoding_mistakes=_DECODING_MISTAKES,
)
