"""mT5 (`MT5ForConditionalGeneration`): T5 v1.1 for 101 languages, whose logits are never scaled.

Source: Xue et al. 2021, "mT5: A Massively Multilingual Pre-trained Text-to-Text Transformer"; `transformers`' MT5.
"""

from ..hugging_face import Family
from .t5 import FAMILY as T5
from .t5 import FIXED, GATED, IGNORED_ARRAYS, IGNORED_SETTINGS, KEPT_IN_FLOAT32, T5_LIKE, tied_by_weights

FAMILY = Family(
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    modules=T5.modules,
    fixed=lambda settings: {**FIXED, "relative_positions": "shared", "logit_scale": "none"},
    defaults={},
    prefix="",
    tables=T5_LIKE,
    gated_modules=GATED,
    ignored_settings=IGNORED_SETTINGS,
    ignored_arrays=IGNORED_ARRAYS,
    kept_in_float32=KEPT_IN_FLOAT32,
    resolve=tied_by_weights,
)
