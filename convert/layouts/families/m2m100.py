"""M2M100 (`M2M100ForConditionalGeneration`): pre-norm with a final norm, fixed positions that skip padding.

Source: Fan et al. 2021, "Beyond English-Centric Multilingual Machine Translation"; `transformers`' M2M100.
"""

import math

import numpy as np

from ....backend.torch_package import require_torch
from ....configs.schema import TransformerConfig
from ..hugging_face import FINAL_NORMS, LAYERS, Family


def position_table(config: TransformerConfig) -> np.ndarray:
    """The table (rows, D) in float32 arithmetic: sin and cos of rounded angles, zeros in the pad id's row.

    It differs from the exact values by up to 7e-5 at 1,024 positions. No file holds it, so PyTorch has to compute it.

    Raises:
        MissingPackageError: PyTorch is not installed.
    """
    require_torch("the position table of m2m_100")
    import torch

    half = config.d_model // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(config.table_length).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos(), torch.zeros(len(angles), config.d_model % 2)], dim=1)
    table[config.pad_id] = 0
    return table.numpy()


FAMILY = Family(
    model_type="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    modules=LAYERS | FINAL_NORMS,
    fixed=lambda settings: {
        "norm_placement": "pre",
        "final_norm": True,
        "positions": "sinusoidal_half_t2t",
        "position_counting": "non_padding",
        "position_offset": settings["pad_token_id"] + 1,
        "output_bias": "none",
    },
    defaults={
        "vocab_size": 128112,
        "activation_function": "relu",
        "attention_dropout": 0.1,
        "encoder_layerdrop": 0.05,
        "decoder_layerdrop": 0.05,
        "scale_embedding": True,
        "forced_eos_token_id": None,
    },
    constants={
        "normalize_before": (True, "transformers' M2M100 is pre-norm regardless of this setting"),
        "normalize_embedding": (False, "transformers' M2M100 has no norm on its embeddings"),
        "add_final_layer_norm": (True, "transformers' M2M100 has a final norm"),
        "static_position_embeddings": (True, "transformers' M2M100 has fixed positions"),
    },
    multilingual=True,
    saves_tables=False,
    ignored_arrays=("model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights"),
    position_table=position_table,
)
