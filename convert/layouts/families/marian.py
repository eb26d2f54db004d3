"""Marian (`MarianMTModel`), as published by OPUS-MT: post-norm, fixed positions, shared or separate embeddings.

Source: Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation in C++"; `transformers`' Marian.
"""

from ..hugging_face import LAYERS, POSITIONS, Family

FAMILY = Family(
    model_type="marian",
    architecture="MarianMTModel",
    modules=LAYERS | POSITIONS,
    fixed=lambda settings: {
        "norm_placement": "post",
        "positions": "sinusoidal_half",
        "output_bias": "stored",
    },
    defaults={
        "vocab_size": 58101,
        "pad_token_id": 58100,
        "bos_token_id": None,
        "eos_token_id": 0,
        "decoder_start_token_id": 58100,
        "forced_eos_token_id": 0,
    },
    constants={
        "normalize_before": (False, "transformers' Marian is post-norm regardless of this setting"),
        "normalize_embedding": (False, "transformers' Marian has no norm on its embeddings"),
        "add_final_layer_norm": (False, "transformers' Marian has no final norm"),
        "static_position_embeddings": (True, "transformers' Marian has fixed positions"),
    },
    separate_embeddings=True,
    saves_tables=False,
)
