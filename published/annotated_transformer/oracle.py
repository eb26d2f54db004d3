"""Oracle of annotated_transformer."""

import torch
from torch import Tensor

from ...configs.schema import TransformerConfig
from ..oracle import Oracle, add_to_bias, layer_activations, sizes_of
from .module import Transformer, greedy_decode, make_masks


def _build(config: TransformerConfig, as_published: bool, dropout: float) -> Transformer:
    sizes = sizes_of(config, as_published, dropout)
    sizes["h"] = sizes.pop("heads")
    return Transformer(config.src_vocab_size, config.tgt_vocab_size, **sizes)


def _call(model: Transformer, src: Tensor, tgt: Tensor, pad_id: int) -> Tensor:
    return model.generator(model(src, tgt, *make_masks(src, tgt, pad_id)))


def _decode(model: Transformer, src: Tensor, pad_id: int, bos_id: int, eos_id: int, longest: int) -> list[int]:
    """Decode; the published limit includes the start token."""
    keep = torch.ones(1, 1, src.shape[1], dtype=torch.bool)
    return greedy_decode(model, src, keep, longest + 1, bos_id)[0, 1:].tolist()


ORACLE = Oracle(
    build=_build,
    call=_call,
    decode=_decode,
    raise_logit=add_to_bias("generator.proj.bias"),
    activations=layer_activations(
        "encoder.layers.*.",
        {
            "self_attention.weights": "self_attn.dropout<",
            "self_attention.output": "self_attn>",
            "self_attention_residual.output": "sublayer.0>",
            "feed_forward.output": "feed_forward>",
            "feed_forward_residual.output": "sublayer.1>",
        },
        "decoder.layers.*.",
        {
            "self_attention.weights": "self_attn.dropout<",
            "self_attention.output": "self_attn>",
            "self_attention_residual.output": "sublayer.0>",
            "cross_attention.weights": "src_attn.dropout<",
            "cross_attention.output": "src_attn>",
            "cross_attention_residual.output": "sublayer.1>",
            "feed_forward.output": "feed_forward>",
            "feed_forward_residual.output": "sublayer.2>",
        },
        {
            "src_input.output": "src_embed>",
            "tgt_input.output": "tgt_embed>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
)
