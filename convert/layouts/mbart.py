"""mBART (`MBartForConditionalGeneration`): pre-norm with a last norm, else as BART; decoding is told its language.

Source: Liu et al. 2020, "Multilingual Denoising Pre-training for Neural Machine Translation"; `transformers`' mBART.
"""

from .hugging_face import EMBEDDING_NORMS, FINAL_NORMS, LAYERS, POSITIONS, Family

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
        "normalize_before": (True, "transformers' mBART is pre-norm whatever it says"),
        "normalize_embedding": (True, "transformers' mBART has a norm on its embeddings"),
        "add_final_layer_norm": (True, "transformers' mBART has a last norm"),
        "static_position_embeddings": (False, "transformers' mBART learns its positions"),
        "extra_pos_embeddings": (2, "transformers' mBART counts positions from row 2"),
    },
    multilingual=True,
)
