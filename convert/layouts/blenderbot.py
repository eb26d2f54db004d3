"""Blenderbot (`BlenderbotForConditionalGeneration`): pre-norm with a last norm, learned positions from row 0.

Source: Roller et al. 2020, "Recipes for Building an Open-Domain Chatbot"; `transformers`' Blenderbot.
"""

from .hugging_face import FINAL_NORMS, LAYERS, POSITIONS, Family

FAMILY = Family(
    model_type="blenderbot",
    architecture="BlenderbotForConditionalGeneration",
    modules=LAYERS | POSITIONS | FINAL_NORMS,  # our module -> theirs
    fixed=lambda settings: {  # the config fields that the family decides
        "norm_placement": "pre",
        "final_norm": True,
        "positions": "learned",
        "output_bias": "stored",
    },
    defaults={  # of settings that config.json leaves out, where they differ from DEFAULTS
        "vocab_size": 8008,
        "max_position_embeddings": 128,
        "d_model": 2560,
        "encoder_layers": 2,
        "decoder_layers": 24,
        "encoder_ffn_dim": 10240,
        "decoder_ffn_dim": 10240,
        "encoder_attention_heads": 32,
        "decoder_attention_heads": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
    },
    constants={  # settings with one value, and why
        "normalize_before": (True, "transformers' Blenderbot is pre-norm whatever it says"),
        "normalize_embedding": (False, "transformers' Blenderbot has no norm on its embeddings"),
        "add_final_layer_norm": (True, "transformers' Blenderbot has a last norm"),
        "static_position_embeddings": (False, "transformers' Blenderbot learns its positions"),
        "extra_pos_embeddings": (0, "transformers' Blenderbot counts positions from row 0"),
        "extra_layer_norm": (False, "transformers' Blenderbot has no further norm"),
        "layernorm_variant": ("prelayernorm", "transformers' Blenderbot is pre-norm whatever it says"),
    },
    kept=("do_blenderbot_90_layernorm", "unk_token_id"),  # settings that its module does not read
)
