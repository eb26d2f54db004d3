"""UMT5 (`UMT5ForConditionalGeneration`): T5 v1.1 for many languages, with relative positions per layer.

Source: Chung et al. 2023, "UniMax: Fairer and More Effective Language Sampling"; `transformers`' UMT5.
"""

from ..hugging_face import Family
from .t5 import (
    BIASES,
    FIXED,
    GATED,
    IGNORED_ARRAYS,
    IGNORED_SETTINGS,
    KEPT_IN_FLOAT32,
    LAYERS,
    SCALED,
    tied_and_scaled,
)

FAMILY = Family(
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    modules=LAYERS
    | {f"{stack}.layers.*.relative_positions": f"{stack}.block.*.layer.0.{BIASES}" for stack in ("encoder", "decoder")},
    fixed=lambda settings: {**FIXED, "relative_positions": "per_layer"},
    defaults={"scale_decoder_outputs": True},
    prefix="",
    tables=SCALED,
    gated_modules=GATED,
    ignored_settings=(*IGNORED_SETTINGS, "scalable_attention"),
    ignored_arrays=IGNORED_ARRAYS,
    kept_in_float32=KEPT_IN_FLOAT32,
    resolve=tied_and_scaled,
)
