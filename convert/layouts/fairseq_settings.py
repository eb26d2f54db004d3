"""The settings of fairseq's `transformer` models, as `args` or `cfg.model` states them, and their meaning in twinax.

Settings of training and of the task are ignored. A setting that changes the model is in one of these tables.
Source: fairseq `models/transformer/transformer_legacy.py` and `transformer_config.py`.
"""

from typing import Any

_BIG = {
    "encoder_embed_dim": 1024,
    "encoder_ffn_embed_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "dropout": 0.3,
}
_PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
# arch -> values of missing settings, where they differ from DEFAULTS
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "transformer_tiny": {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
    "transformer_iwslt_de_en": {
        "encoder_ffn_embed_dim": 1024,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "transformer_wmt_en_de": {},
    "transformer_vaswani_wmt_en_de_big": _BIG,
    "transformer_vaswani_wmt_en_fr_big": _BIG | {"dropout": 0.1},
    "transformer_wmt_en_de_big": _BIG | {"attention_dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": _BIG | _PRE_NORM | {"attention_dropout": 0.1, "activation_dropout": 0.1},
}
# Values of missing settings; None: that of the encoder
DEFAULTS: dict[str, Any] = {
    "encoder_embed_dim": 512,
    "decoder_embed_dim": None,
    "encoder_ffn_embed_dim": 2048,
    "decoder_ffn_embed_dim": None,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relu_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "activation_fn": "relu",
    "share_decoder_input_output_embed": False,
    "share_all_embeddings": False,
    "merge_src_tgt_embed": False,
    "no_token_positional_embeddings": False,
    "no_scale_embedding": False,
    "layernorm_embedding": False,
    "no_decoder_final_norm": False,
}

# setting -> config field with the same value
SETTINGS = {
    "encoder_embed_dim": "d_model",
    "encoder_ffn_embed_dim": "d_ff",
    "decoder_ffn_embed_dim": "decoder_d_ff",
    "encoder_layers": "num_encoder_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "decoder_num_heads",
    "max_source_positions": "max_length",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "ffn_dropout",
    "encoder_layerdrop": "encoder_layerdrop",
    "decoder_layerdrop": "decoder_layerdrop",
}
# value of activation_fn -> that of the config field; of two names for a value the first is written
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
# Pairs of settings that must be equal, and the reason
EQUAL = {
    ("decoder_embed_dim", "encoder_embed_dim"): "encoder and decoder have one width",
    ("decoder_input_dim", "encoder_embed_dim"): "embeddings have the width of the model",
    ("decoder_output_dim", "encoder_embed_dim"): "embeddings have the width of the model",
    ("decoder_normalize_before", "encoder_normalize_before"): "encoder and decoder have one norm placement",
    ("decoder_learned_pos", "encoder_learned_pos"): "source and target have positions of one kind",
}
_BOTH = ("layers_to_keep", "recurrent_stacking", "factorized_embed_dim", "add_adapters", "xformers_att_config")
# Settings that select what twinax does not have, unless they are absent, None, False, 0 or empty
REFUSED = (
    *("adaptive_softmax_cutoff", "adaptive_input", "cross_self_attention", "no_cross_attention", "char_inputs"),
    *("character_embeddings", "use_factorized_embedding", "quant_noise_pq", "quant_noise_scalar", "base_layers"),
    *("scale_attn", "scale_heads", "scale_fc", "scale_resids", "moe_freq", "moe_expert_count", "decoder_langtok"),
    *("lang_tok_replacing_bos_eos", *(f"{side}_{name}" for side in ("encoder", "decoder") for name in _BOTH)),
)
