"""mBART (`MBartForConditionalGeneration`): BART with pre-norm and a final norm; decoding starts with a language token.

Source: Liu et al. 2020, "Multilingual Denoising Pre-training for Neural Machine Translation"; `transformers`' mBART.
"""

from ..hugging_face import EMBEDDING_NORMS, FINAL_NORMS, LAYERS, POSITIONS, Family

FAMILY = Family(
    model_type="mbart",
    architecture="MBartForConditionalGeneration",
    modules=LAYERS | POSITIONS | EMBEDDING_NORMS | FINAL_NORMS,
    fixed=lambda settings: {
        "norm_placement": "pre",
        "final_norm": True,
        "embedding_norm": "before_dropout",
        "positions": "learned",
        "position_offset": 2,
        "output_bias": "stored",
    },
    defaults={"decoder_start_token_id": None},
    constants={
        "normalize_before": (True, "transformers' mBART is pre-norm regardless of this setting"),
        "normalize_embedding": (True, "transformers' mBART has a norm on its embeddings"),
        "add_final_layer_norm": (True, "transformers' mBART has a final norm"),
        "static_position_embeddings": (False, "transformers' mBART has learned positions"),
        "extra_pos_embeddings": (2, "transformers' mBART counts positions from row 2"),
    },
    multilingual=True,
)
