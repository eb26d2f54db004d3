"""The settings in a config.json of `transformers`' encoder-decoder families, and their meaning in twinax.

A setting that is in none of these tables, nor in a family's own, is rejected.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tables:
    """The settings that several families share."""

    names: Mapping[str, str]  # setting -> config field with the same value
    # setting -> its value -> config fields; of several values with the same fields the first is written
    values: Mapping[str, Mapping[Any, Mapping[str, Any]]]
    dropout: tuple[str, tuple[str, ...]]  # (setting, config fields of the sites that have its rate)
    defaults: Mapping[str, Any]  # values of settings missing from config.json; a family's own defaults override them
    repeated: Mapping[str, tuple[str, Callable[[Any], Any]]]  # setting -> (setting that determines it, its function)
    fallbacks: Mapping[str, str] = field(default_factory=dict)  # setting -> the setting that it equals if it is None


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def same(value: Any) -> Any:
    """The value itself."""
    return value


BART_LIKE = Tables(
    names={
        "d_model": "d_model",
        "encoder_layers": "num_encoder_layers",
        "decoder_layers": "num_decoder_layers",
        "encoder_attention_heads": "num_heads",
        "decoder_attention_heads": "decoder_num_heads",
        "encoder_ffn_dim": "d_ff",
        "decoder_ffn_dim": "decoder_d_ff",
        "max_position_embeddings": "max_length",
        "attention_dropout": "attention_dropout",
        "activation_dropout": "ffn_dropout",
        "encoder_layerdrop": "encoder_layerdrop",
        "decoder_layerdrop": "decoder_layerdrop",
        "pad_token_id": "pad_id",
        "bos_token_id": "bos_id",
        "eos_token_id": "eos_id",
        "decoder_start_token_id": "decoder_start_id",
        "forced_bos_token_id": "forced_bos_id",
        "forced_eos_token_id": "forced_eos_id",
    },
    values={
        "activation_function": {name: {"activation": value} for name, value in ACTIVATIONS.items()},
        "scale_embedding": {True: {"embedding_scale": "sqrt_d_model"}, False: {"embedding_scale": "none"}},
    },
    dropout=("dropout", ("embedding_dropout", "residual_dropout")),
    defaults={
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
        "vocab_size": 50265,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_bos_token_id": None,
        "forced_eos_token_id": 2,
        "share_encoder_decoder_embeddings": True,
        "decoder_vocab_size": None,  # None: vocab_size
        "dtype": None,  # None: the dtype of the weights
    },
    repeated={
        "hidden_size": ("d_model", same),
        "num_hidden_layers": ("encoder_layers", same),
        "num_attention_heads": ("encoder_attention_heads", same),
    },
    fallbacks={"decoder_vocab_size": "vocab_size"},
)

# generation_config.json, if present, overrides these, as in `generate`.
DECODING = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")

# Settings that determine config fields in other ways; the second group exists in some families only.
DERIVED = ("vocab_size", "tie_word_embeddings", "dtype", "torch_dtype")
SEPARATE_EMBEDDINGS = ("share_encoder_decoder_embeddings", "decoder_vocab_size")

# Settings with a single supported value, and the reason.
CONSTANTS: dict[str, tuple[Any, str]] = {
    "is_encoder_decoder": (True, "twinax supports encoder-decoders only"),
    "is_decoder": (False, "twinax supports encoder-decoders only"),
    "add_cross_attention": (False, "twinax supports encoder-decoders only"),
    "tie_encoder_decoder": (False, "twinax does not share layers between encoder and decoder"),
    "torchscript": (False, "it breaks the tying of the embeddings"),
    "chunk_size_feed_forward": (0, "twinax does not split the feed-forward network into chunks"),
    "pruned_heads": ({}, "twinax does not support pruned heads"),
    "do_blenderbot_90_layernorm": (False, "twinax adds positions before the norm of the embeddings"),
    "use_bfloat16": (False, "the dtype is set by dtype"),
}

# Settings of decoding and bookkeeping, which do not affect the model's computation; they are written back.
_IGNORED = """
_attn_implementation_autoset _commit_hash _name_or_path _num_labels add_bias_logits architectures bad_words_ids
begin_suppress_tokens classif_dropout classifier_dropout cross_attention_hidden_size diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty extra_pos_embeddings finetuning_task
force_bos_token_to_be_generated gradient_checkpointing id2label init_std label2id length_penalty max_length
max_new_tokens min_length min_new_tokens model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams
num_labels num_return_sequences output_attentions output_hidden_states output_past output_scores prefix problem_type
remove_invalid_values renormalize_logits repetition_penalty return_dict return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p transformers_version
typical_p use_cache xla_device
"""
IGNORED = frozenset(_IGNORED.split())
