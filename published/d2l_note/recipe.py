"""d2l_note: a weekly note after Dive into Deep Learning.

The note omits sizes, dropout and ids; these are from the book.
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
    d_model=256,
    num_heads=4,
    d_ff=64,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=10,
    q_proj_bias=False,
    k_proj_bias=False,
    v_proj_bias=False,
    out_proj_bias=False,
    mask_value=-1e6,
    decoder_mask="causal_in_training",
    embedding_dropout=0.2,
    attention_dropout=0.2,
    residual_dropout=0.2,
    linear_init="torch_default",
    embedding_init="torch_default",
    pad_id=1,
    bos_id=2,
    eos_id=3,
    decoder_start_id=2,
)

_REPAIRS: dict[str, Any] = {"decoder_mask": "causal"}

# Not specified in the note; from the book.
_TRAINING = TrainingConfig(
    beta2=0.999,
    eps=1e-8,
    clip_norm=1.0,
    schedule="constant",
    learning_rate=5e-3,
    warmup_updates=0,
)


_BREAKS: dict[str, str] = {
    "decoder_mask": "the decoder: causal in training only, so validation sees the labels",
}

# Not specified in the note; from the book.
_TOKENIZER = TokenizerConfig(
    kind="word",
    joint=False,
    special_order=("unk", "pad", "bos", "eos"),
    bos_token="<bos>",
    eos_token="<eos>",
    min_frequency=2,
    lowercase=True,
    split="d2l",
    normalization="none",
)


# Not specified in the note; the book's loop. As published, its first step raises.
_DECODING: DecodingConfig | None = DecodingConfig(force_end=False, allow_padding=True)


def _run(as_published: bool) -> RunConfig:
    """Multi30k, with the book's batches of 128 sentences and 30 epochs; the note specifies the model only.

    The book's sentences have at most 10 tokens; these have up to 64.
    """
    return RunConfig(
        corpus=CorpusConfig(dataset="bentrevett/multi30k", src_column="de", tgt_column="en", valid_split="validation"),
        tokenizer=replace(_TOKENIZER, vocab_size=30_000),
        batches=BatchConfig(tokens=2048),
        model=TransformerConfig.published("d2l_note", as_published=as_published, max_length=64),
        training=TrainingConfig.published("d2l_note", as_published=as_published),
        loop=LoopConfig(epochs=30),
    )


RECIPE = Recipe(
    model=_MODEL,
    repairs=_REPAIRS,
    breaks=_BREAKS,
    training=_TRAINING,
    tokenizer=_TOKENIZER,
    run=_run,
    decoding=_DECODING,
)
