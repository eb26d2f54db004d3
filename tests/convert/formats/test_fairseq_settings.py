"""fairseq's architectures and settings, as literal fields of the config."""

import pytest

from twinax.convert.layouts import fairseq

ARCHITECTURES = {  # arch -> d_model, d_ff, heads, layers, dropout, of attention, of activations, pre-norm
    "transformer": (512, 2048, 8, 6, 0.1, 0.0, 0.0, False),
    "transformer_tiny": (64, 64, 2, 2, 0.1, 0.0, 0.0, False),
    "transformer_iwslt_de_en": (512, 1024, 4, 6, 0.1, 0.0, 0.0, False),
    "transformer_wmt_en_de": (512, 2048, 8, 6, 0.1, 0.0, 0.0, False),
    "transformer_vaswani_wmt_en_de_big": (1024, 4096, 16, 6, 0.3, 0.0, 0.0, False),
    "transformer_vaswani_wmt_en_fr_big": (1024, 4096, 16, 6, 0.1, 0.0, 0.0, False),
    "transformer_wmt_en_de_big": (1024, 4096, 16, 6, 0.3, 0.1, 0.0, False),
    "transformer_wmt_en_de_big_t2t": (1024, 4096, 16, 6, 0.3, 0.1, 0.1, True),
}


def config_of(**settings):
    return fairseq.config_of({"arch": "transformer", **settings}, (100, 90), "float32")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_fills_in_its_settings(arch):
    """Literal numbers of fairseq's `transformer_legacy.py`."""
    config, (d_model, d_ff, heads, layers, dropout, attention, activation, pre_norm) = (
        config_of(arch=arch),
        ARCHITECTURES[arch],
    )
    assert (config.d_model, config.d_ff, config.num_heads, config.decoder_num_heads) == (d_model, d_ff, heads, None)
    assert (config.num_encoder_layers, config.num_decoder_layers, config.max_length) == (layers, layers, 1024)
    assert (config.residual_dropout, config.embedding_dropout) == (dropout, dropout)
    assert (config.attention_dropout, config.ffn_dropout) == (attention, activation)
    assert (config.norm_placement, config.final_norm) == (("pre", True) if pre_norm else ("post", False))
    assert config.activation == "relu"


RENAMED = {  # setting -> (value, config field, its value)
    "relu_dropout": (0.2, "ffn_dropout", 0.2),
    "activation_dropout": (0.3, "ffn_dropout", 0.3),
    "attention_dropout": (0.4, "attention_dropout", 0.4),
    "dropout": (0.25, "embedding_dropout", 0.25),
    "encoder_layerdrop": (0.1, "encoder_layerdrop", 0.1),
    "decoder_layerdrop": (0.2, "decoder_layerdrop", 0.2),
    "encoder_layers": (3, "num_encoder_layers", 3),
    "decoder_layers": (4, "num_decoder_layers", 4),
    "encoder_attention_heads": (4, "num_heads", 4),
    "decoder_attention_heads": (4, "decoder_num_heads", 4),
    "encoder_ffn_embed_dim": (32, "d_ff", 32),
    "decoder_ffn_embed_dim": (48, "decoder_d_ff", 48),
    "max_source_positions": (99, "max_length", 99),
    "layernorm_embedding": (True, "embedding_norm", "before_dropout"),
    "no_scale_embedding": (True, "embedding_scale", "none"),
    "no_token_positional_embeddings": (True, "positions", "none"),
    "share_decoder_input_output_embed": (True, "tied_output", True),
    "merge_src_tgt_embed": (True, "shared_embeddings", True),
    "swish": ("swish", "activation", "silu"),
    "gelu": ("gelu", "activation", "gelu"),
    "gelu_accurate": ("gelu_accurate", "activation", "gelu_tanh"),
    "gelu_fast": ("gelu_fast", "activation", "gelu_tanh"),
}


@pytest.mark.parametrize("setting", RENAMED)
def test_a_setting_has_its_field(setting):
    value, field, expected = RENAMED[setting]
    name = "activation_fn" if field == "activation" else setting
    sizes = (90, 90) if field == "shared_embeddings" else (100, 90)
    config = fairseq.config_of({"arch": "transformer", name: value}, sizes, "float32")
    assert getattr(config, field) == expected
    assert getattr(config_of(), field) != expected
