"""Pegasus (`PegasusForConditionalGeneration`): pre-norm with a final norm, fixed positions.

Source: Zhang et al. 2020, "PEGASUS: Pre-training with Extracted Gap-sentences"; `transformers`' Pegasus.
"""

from ..hugging_face import FINAL_NORMS, LAYERS, POSITIONS, Family

FAMILY = Family(
    model_type="pegasus",
    architecture="PegasusForConditionalGeneration",
    modules=LAYERS | POSITIONS | FINAL_NORMS,
    fixed=lambda settings: {
        "norm_placement": "pre",
        "final_norm": True,
        "positions": "sinusoidal_half",
        "output_bias": "stored",
    },
    defaults={
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": 1,
    },
    constants={
        "normalize_before": (True, "transformers' Pegasus is pre-norm regardless of this setting"),
        "normalize_embedding": (False, "transformers' Pegasus has no norm on its embeddings"),
        "add_final_layer_norm": (True, "transformers' Pegasus has a final norm"),
        "static_position_embeddings": (True, "transformers' Pegasus has fixed positions"),
    },
)
