"""T5 (`T5ForConditionalGeneration`), v1.1 and Flan-T5 included: relative positions, RMS norms, no biases.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning"; Shazeer 2020 for v1.1; `transformers`' T5.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..hugging_face import Family, Settings
from ..hugging_face_settings import ACTIVATIONS, Tables, same

_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
_ATTENTIONS = {
    "encoder.layers.*.self_attention": "encoder.block.*.layer.0.SelfAttention",
    "decoder.layers.*.self_attention": "decoder.block.*.layer.0.SelfAttention",
    "decoder.layers.*.cross_attention": "decoder.block.*.layer.1.EncDecAttention",
}
_NORMS = {
    "encoder.layers.*.self_attention_residual.norm": "encoder.block.*.layer.0.layer_norm",
    "encoder.layers.*.feed_forward_residual.norm": "encoder.block.*.layer.1.layer_norm",
    "encoder.final_norm": "encoder.final_layer_norm",
    "decoder.layers.*.self_attention_residual.norm": "decoder.block.*.layer.0.layer_norm",
    "decoder.layers.*.cross_attention_residual.norm": "decoder.block.*.layer.1.layer_norm",
    "decoder.layers.*.feed_forward_residual.norm": "decoder.block.*.layer.2.layer_norm",
    "decoder.final_norm": "decoder.final_layer_norm",
}
_FEED_FORWARDS = {
    "encoder.layers.*.feed_forward": "encoder.block.*.layer.1.DenseReluDense",
    "decoder.layers.*.feed_forward": "decoder.block.*.layer.2.DenseReluDense",
}


def _children(parents: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Flax module -> module of `transformers`, for the children of these modules."""
    return {f"{a}.{child}": f"{b}.{name}" for a, b in parents.items() for child, name in names.items()}


LAYERS = {
    "output.proj": "lm_head",
    **_NORMS,
    **_children(_ATTENTIONS, _PROJECTIONS),
    **_children(_FEED_FORWARDS, {"inner_proj": "wi", "outer_proj": "wo"}),
}
GATED = _children(_FEED_FORWARDS, {"gate_proj": "wi_0", "inner_proj": "wi_1"})
BIASES = "SelfAttention.relative_attention_bias"

FIXED = {
    "norm_placement": "pre",
    "norm": "rms_norm",
    "norm_bias": False,
    "final_norm": True,
    "shared_embeddings": True,
    "embedding_scale": "none",
    "embedding_padding": "trained",
    "positions": "none",
    "output_bias": "none",
    **dict.fromkeys(("q_proj_bias", "k_proj_bias", "v_proj_bias", "out_proj_bias", "ffn_bias"), False),
    "score_scaling": "none",
}

# transformers reads "gated-gelu" as "gated-gelu_new", because T5 v1.1 was published so
_GATED = {"gated-gelu": "gelu_tanh"} | {f"gated-{name}": value for name, value in ACTIVATIONS.items() if name != "gelu"}
_PLAIN = {name: {"activation": value, "ffn_gate": False} for name, value in ACTIVATIONS.items()}
FEED_FORWARDS = {name: {"activation": value, "ffn_gate": True} for name, value in _GATED.items()} | _PLAIN


def _activation(feed_forward_proj: Any) -> str:
    """The setting `dense_act_fn` that `transformers` derives."""
    return "gelu_new" if feed_forward_proj == "gated-gelu" else str(feed_forward_proj).removeprefix("gated-")


T5_LIKE = Tables(
    names={
        "d_model": "d_model",
        "d_kv": "head_dim",
        "d_ff": "d_ff",
        "num_layers": "num_encoder_layers",
        "num_decoder_layers": "num_decoder_layers",
        "num_heads": "num_heads",
        "n_positions": "max_length",
        "relative_attention_num_buckets": "relative_position_buckets",
        "relative_attention_max_distance": "relative_position_max_distance",
        "layer_norm_epsilon": "norm_eps",
        "pad_token_id": "pad_id",
        "bos_token_id": "bos_id",
        "eos_token_id": "eos_id",
        "decoder_start_token_id": "decoder_start_id",
        "forced_bos_token_id": "forced_bos_id",
        "forced_eos_token_id": "forced_eos_id",
    },
    values={"feed_forward_proj": FEED_FORWARDS},
    dropout=(
        "dropout_rate",
        ("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout", "final_dropout"),
    ),
    defaults={
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": None,  # None: num_layers
        "num_heads": 6,
        "n_positions": 512,  # transformers has no limit; T5 was trained on sequences of 512
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "vocab_size": 250112,
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "share_encoder_decoder_embeddings": True,
        "decoder_vocab_size": None,  # None: vocab_size
        "dtype": None,  # None: the dtype of the weights
    },
    repeated={
        "hidden_size": ("d_model", same),
        "num_hidden_layers": ("num_layers", same),
        "num_attention_heads": ("num_heads", same),
        "head_dim": ("d_kv", same),
        "dense_act_fn": ("feed_forward_proj", _activation),
        "is_gated_act": ("feed_forward_proj", lambda value: str(value).startswith("gated-")),
    },
    fallbacks={"num_decoder_layers": "num_layers", "decoder_vocab_size": "vocab_size"},
)


IGNORED_SETTINGS = ("initializer_factor",)
KEPT_IN_FLOAT32 = r"\.wo\.weight$"
IGNORED_ARRAYS = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

SCALED = replace(
    T5_LIKE,
    values={
        **T5_LIKE.values,
        "scale_decoder_outputs": {True: {"logit_scale": "rsqrt_d_model"}, False: {"logit_scale": "none"}},
    },
)


def tied_by_weights(settings: Settings, tied: bool) -> dict[str, Any]:
    """The settings with `tie_word_embeddings` as in the weights: `transformers` unties tables that differ."""
    return {**settings, "tie_word_embeddings": tied}


def tied_and_scaled(settings: Settings, tied: bool) -> dict[str, Any]:
    """As `tied_by_weights`; `tie_word_embeddings` also decides about the scale of the logits if no setting does."""
    scaled = settings.get("tie_word_embeddings") is not False
    return tied_by_weights({"scale_decoder_outputs": scaled, **settings}, tied)


FAMILY = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    modules=LAYERS
    | {f"{stack}.relative_positions": f"{stack}.block.0.layer.0.{BIASES}" for stack in ("encoder", "decoder")},
    fixed=lambda settings: {**FIXED, "relative_positions": "shared"},
    defaults={
        "vocab_size": 32128,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "feed_forward_proj": "relu",
        "decoder_start_token_id": None,
        "scale_decoder_outputs": True,
    },
    prefix="",
    tables=SCALED,
    ignored_settings=IGNORED_SETTINGS,
    ignored_arrays=IGNORED_ARRAYS,
    kept_in_float32=KEPT_IN_FLOAT32,
    gated_modules=GATED,
    resolve=tied_and_scaled,
)
