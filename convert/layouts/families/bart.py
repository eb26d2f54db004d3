"""BART (`BartForConditionalGeneration`): post-norm, learned positions from row 2, a norm on the embeddings.

Source: Lewis et al. 2020, "BART: Denoising Sequence-to-Sequence Pre-training"; `transformers`' BART.
"""

from ..hugging_face import EMBEDDING_NORMS, LAYERS, POSITIONS, Family

FAMILY = Family(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    modules=LAYERS | POSITIONS | EMBEDDING_NORMS,
    fixed=lambda settings: {
        "norm_placement": "post",
        "embedding_norm": "before_dropout",
        "positions": "learned",
        "position_offset": 2,
        "output_bias": "stored",
    },
    defaults={},
    constants={
        "normalize_before": (False, "transformers' BART is post-norm regardless of this setting"),
        "normalize_embedding": (True, "transformers' BART has a norm on its embeddings"),
        "add_final_layer_norm": (False, "transformers' BART has no final norm"),
        "static_position_embeddings": (False, "transformers' BART has learned positions"),
        "extra_pos_embeddings": (2, "transformers' BART counts positions from row 2"),
    },
    ignored_arrays=("model.encoder.version", "model.decoder.version"),
)
