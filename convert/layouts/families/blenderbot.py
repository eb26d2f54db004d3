"""Blenderbot (`BlenderbotForConditionalGeneration`): pre-norm with a final norm, learned positions from row 0.

Source: Roller et al. 2020, "Recipes for Building an Open-Domain Chatbot"; `transformers`' Blenderbot.
"""

from ..hugging_face import FINAL_NORMS, LAYERS, POSITIONS, Family

FAMILY = Family(
    model_type="blenderbot",
    architecture="BlenderbotForConditionalGeneration",
    modules=LAYERS | POSITIONS | FINAL_NORMS,  # Flax module -> module of `transformers`
    fixed=lambda settings: {  # config fields that are the same for the whole family
        "norm_placement": "pre",
        "final_norm": True,
        "positions": "learned",
        "output_bias": "stored",
    },
    defaults={  # values of settings missing from config.json, where they differ from DEFAULTS
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
    constants={  # settings with a single supported value, and the reason
        "normalize_before": (True, "transformers' Blenderbot is pre-norm regardless of this setting"),
        "normalize_embedding": (False, "transformers' Blenderbot has no norm on its embeddings"),
        "add_final_layer_norm": (True, "transformers' Blenderbot has a final norm"),
        "static_position_embeddings": (False, "transformers' Blenderbot has learned positions"),
        "extra_pos_embeddings": (0, "transformers' Blenderbot counts positions from row 0"),
        "extra_layer_norm": (False, "transformers' Blenderbot has no additional norm"),
        "layernorm_variant": ("prelayernorm", "transformers' Blenderbot is pre-norm regardless of this setting"),
    },
    ignored_settings=("do_blenderbot_90_layernorm", "unk_token_id"),  # settings that its module does not read
)
