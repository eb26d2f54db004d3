"""Ready-made model sizes: `TransformerConfig.preset("base")`."""

from ..configs.schema import TransformerConfig

_BASE = TransformerConfig(
    src_vocab_size=37_000,
    tgt_vocab_size=37_000,
    shared_embeddings=True,
    tied_output=True,
    output_bias="none",
    q_proj_bias=False,
    k_proj_bias=False,
    v_proj_bias=False,
    out_proj_bias=False,
)

PRESETS: dict[str, TransformerConfig] = {
    # Small enough to prove in seconds. Heads are wider than d_model / num_heads, so that all sizes differ.
    "tiny": TransformerConfig(
        src_vocab_size=101,
        tgt_vocab_size=103,
        d_model=32,
        num_heads=3,
        head_dim=13,
        v_head_dim=11,
        d_ff=59,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_length=64,
        norm_placement="pre",
        final_norm=True,
    ),
    # For a laptop: pre-norm, which trains without a long warm-up (Xiong et al. 2020, section 4). Pegasus has this
    # shape, so that a trained model can be exported to transformers.
    "small": TransformerConfig(
        src_vocab_size=8_000,
        tgt_vocab_size=8_000,
        d_model=256,
        num_heads=4,
        d_ff=1024,
        num_encoder_layers=3,
        num_decoder_layers=3,
        max_length=256,
        norm_placement="pre",
        final_norm=True,
        shared_embeddings=True,
        tied_output=True,
        positions="sinusoidal_half",
    ),
    # Vaswani et al. 2017, table 3, "base" and "big"; vocabulary of section 5.1.
    "base": _BASE,
    "big": _BASE.replace(d_model=1024, num_heads=16, d_ff=4096, embedding_dropout=0.3, residual_dropout=0.3),
    # Raffel et al. 2020, section 3.7, "small", as `transformers` loads t5-small.
    "t5_small": _BASE.replace(
        src_vocab_size=32_128,
        tgt_vocab_size=32_128,
        norm_placement="pre",
        norm="rms_norm",
        norm_eps=1e-6,
        norm_bias=False,
        final_norm=True,
        embedding_scale="none",
        positions="none",
        relative_positions="shared",
        logit_scale="rsqrt_d_model",
        score_scaling="none",
        ffn_bias=False,
        attention_dropout=0.1,
        ffn_dropout=0.1,
        final_dropout=0.1,
        linear_init="mesh_tensorflow",
        embedding_init="torch_default",
        bos_id=None,
        eos_id=1,
        decoder_start_id=0,
    ),
}
