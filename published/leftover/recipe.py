"""leftover: a hand-written Transformer of 2025, opus_books, English to Italian."""

from typing import Any

from ...configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from ...configs.decoding import DecodingConfig
from ...configs.run import LoopConfig, RunConfig
from ...configs.schema import TransformerConfig
from ...configs.training import TrainingConfig
from ..recipe import Recipe

_MODEL = TransformerConfig(
    src_vocab_size=30_000,
    tgt_vocab_size=30_000,
    num_encoder_layers=8,
    num_decoder_layers=8,
    max_length=350,
    norm_eps=1e-12,
    embedding_padding="frozen",
    output_activation="softmax",
    mask_value=-1e-9,
    encoder_mask="source_and_query",
    decoder_mask="causal_padding_and_query",
    cross_mask="encoder",
    attention_dropout=0.1,
    ffn_dropout=0.1,
    linear_init="torch_default",
    embedding_init="torch_padding_idx",
    pad_id=1,
    bos_id=2,
    eos_id=3,
    decoder_start_id=2,
)

_REPAIRS: dict[str, Any] = {
    "output_activation": "none",
    "mask_value": "exact",
    "encoder_mask": "source",
    "decoder_mask": "causal_and_padding",
    "cross_mask": "source",
}

# A resumed training restarts the cosine schedule; this mistake of its loop is not part of the config.
_TRAINING = TrainingConfig(
    label_smoothing=0.05,
    beta2=0.999,
    clip_norm=1.0,
    schedule="cosine",
    learning_rate=1e-5,
    warmup_updates=0,
    final_learning_rate=1e-6,
    first_update=0,
)


_BREAKS: dict[str, str] = {
    "output_activation": "the output: cross entropy of a softmax of a softmax stays within one nat of log V",
    "mask_value": "every attention: masked scores become -1e-9, which masks neither padding nor the future",
    "encoder_mask": "the encoder: query rows of padding are fully masked and attend uniformly to every key",
    "decoder_mask": "the decoder: query rows of padding are fully masked and attend uniformly to every key",
    "cross_mask": "cross-attention: it gets the encoder's square mask, so both sides must have the same length",
}

_TOKENIZER = TokenizerConfig(
    kind="word",
    joint=False,
    special_order=("unk", "pad", "bos", "eos"),
    unk_token="[UNK]",
    pad_token="[PAD]",
    bos_token="[SOS]",
    eos_token="[EOS]",
    min_frequency=2,
    vocab_size=30_000,
    split="word_characters",
    normalization="none",
    source_bos=True,
)

_DECODING_FIELDS: dict[str, Any] = {"decoder_mask": "causal"}

# As published, decoding raises at its second step; twinax raises before the first.
_DECODING: DecodingConfig | None = DecodingConfig(force_end=False, allow_padding=True)
_COUNTED_START_TOKENS = 1  # its maximum length, the number of positions, includes the start token


def _run(as_published: bool) -> RunConfig:
    """opus_books, English to Italian, 100 epochs; batches with the tokens of about 32 sentences.

    As published, the validation pairs are part of the training data. They are the last tenth here, not a random one.
    """
    return RunConfig(
        corpus=CorpusConfig(
            dataset="Helsinki-NLP/opus_books",
            subset="en-it",
            split="train" if as_published else "train[:90%]",
            valid_split="train[90%:]",
            src_column="en",
            tgt_column="it",
        ),
        tokenizer=_TOKENIZER,
        batches=BatchConfig(tokens=1024),
        model=TransformerConfig.published("leftover", as_published=as_published),
        training=TrainingConfig.published("leftover", as_published=as_published),
        loop=LoopConfig(epochs=100, translations=0 if as_published else 200),  # as published it cannot translate
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
    counted_start_tokens=_COUNTED_START_TOKENS,
)
