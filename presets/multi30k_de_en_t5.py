"""German to English on Multi30k with a model of T5's architecture, gated as in T5 v1.1; sizes of multi30k_de_en.

    twinax train multi30k_de_en_t5

Offline: see multi30k_de_en. Not measured.
"""

from dataclasses import replace

from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from . import multi30k_de_en


def config() -> RunConfig:
    """The config of the run."""
    run = multi30k_de_en.config()
    model = TransformerConfig.preset(
        "t5_small",
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=4,
        num_decoder_layers=4,
        max_length=256,
        activation="gelu_tanh",
        ffn_gate=True,
    )
    return replace(run, model=model)
