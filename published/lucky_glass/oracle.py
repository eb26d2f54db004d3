"""Oracle of lucky_glass."""

from torch import Tensor

from ...configs.schema import TransformerConfig
from ..oracle import Oracle, add_to_bias, layer_activations, sizes_of
from .module import PAD, Transformer


def _build(config: TransformerConfig, as_published: bool, dropout: float) -> Transformer:
    return Transformer(config.src_vocab_size, config.tgt_vocab_size, **sizes_of(config, as_published, dropout))


def _call(model: Transformer, src: Tensor, tgt: Tensor, pad_id: int) -> Tensor:
    return model(src, tgt)


ORACLE = Oracle(
    build=_build,
    call=_call,
    raise_logit=add_to_bias("linear.bias"),
    accepts=lambda config, as_published: config.pad_id == PAD,
    activations=layer_activations(
        "encoder.layers.*.",
        {
            "self_attention.weights": "attention.attentions.#.weights<",
            "self_attention.output": "attention.dropout<",
            "self_attention_residual.output": "attention>",
            "feed_forward.output": "feed_forward.dropout<",
            "feed_forward_residual.output": "feed_forward>",
        },
        "decoder.layers.*.",
        {
            "self_attention.weights": "masked_attention.attentions.#.weights<",
            "self_attention.output": "masked_attention.dropout<",
            "self_attention_residual.output": "masked_attention>",
            "cross_attention.weights": "attention.attentions.#.weights<",
            "cross_attention.output": "attention.dropout<",
            "cross_attention_residual.output": "attention>",
            "feed_forward.output": "feed_forward.dropout<",
            "feed_forward_residual.output": "feed_forward>",
        },
        {
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
)
