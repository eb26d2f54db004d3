"""lucky_glass: a blog post of 2023, Multi30k, German to English."""

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
    d_ff=512,
    num_encoder_layers=3,
    num_decoder_layers=3,
    max_length=1000,
    norm="layer_norm_over_length",
    norm_scale=False,
    norm_bias=False,
    positions="stored",  # initialization overwrites the table with noise
    q_proj_bias=False,
    k_proj_bias=False,
    v_proj_bias=False,
    out_proj_bias=False,
    decoder_mask="causal_and_padding",
    cross_attention_residual="query_only",
    linear_init="xavier_uniform_per_head",
    embedding_init="xavier_uniform",
    pad_id=1,
    bos_id=2,
    eos_id=3,
    decoder_start_id=2,
)

_REPAIRS: dict[str, Any] = {
    "norm": "layer_norm",
    "positions": "sinusoidal_interleaved",
    "cross_attention_residual": "add",
}

_TRAINING = TrainingConfig(
    beta2=0.98,
    schedule="step",  # the rate falls to 1e-13 in ten epochs
    learning_rate=1e-4,
    warmup_updates=0,
    step_updates=227,  # an epoch of Multi30k in batches of 128
    first_update=0,
)

_TRAINING_REPAIRS: dict[str, Any] = {"schedule": "constant", "step_updates": None}

_BREAKS: dict[str, str] = {
    "norm": "every norm: over positions and features together, so later tokens and padding change the outputs",
    "positions": "both inputs: initialization overwrites the table with noise, and its formula is wrong too",
    "cross_attention_residual": "every decoder layer: the output of cross-attention is discarded, so the source has no "
    "effect",
    "schedule": "the schedule: the rate is divided by ten after each epoch, down to 1e-13, so the loss stops falling",
}

_TOKENIZER = TokenizerConfig(
    kind="word",
    joint=False,
    languages=("de", "en"),  # pre-tokenized by spaCy
    normalization="none",
    special_order=("unk", "pad", "bos", "eos"),
    bos_token="<bos>",
    eos_token="<eos>",
    source_bos=True,
)


_DECODING: DecodingConfig | None = None  # no decoding was published


def _run(as_published: bool) -> RunConfig:
    """Multi30k, ten epochs; batches with the tokens of about 128 sentences, in shuffled order."""
    return RunConfig(
        corpus=CorpusConfig(dataset="bentrevett/multi30k", src_column="de", tgt_column="en", valid_split="validation"),
        tokenizer=replace(_TOKENIZER, vocab_size=30_000),
        batches=BatchConfig(tokens=2048),
        model=TransformerConfig.published("lucky_glass", as_published=as_published),
        training=replace(TrainingConfig.published("lucky_glass", as_published=as_published), step_updates=None),
        loop=LoopConfig(epochs=10),
    )


RECIPE = Recipe(
    model=_MODEL,
    repairs=_REPAIRS,
    breaks=_BREAKS,
    training=_TRAINING,
    training_repairs=_TRAINING_REPAIRS,
    tokenizer=_TOKENIZER,
    run=_run,
    decoding=_DECODING,
)
