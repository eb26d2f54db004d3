"""Oracle of d2l_note."""

import torch
from torch import Tensor

from ...configs.schema import TransformerConfig
from ..oracle import Oracle, add_to_bias, layer_activations, sizes_of
from .module import Transformer, predict


def _build(config: TransformerConfig, as_published: bool, dropout: float) -> Transformer:
    sizes = sizes_of(config, as_published, dropout)
    return Transformer(config.src_vocab_size, config.tgt_vocab_size, seq_len=config.table_length, **sizes)


def _call(model: Transformer, src: Tensor, tgt: Tensor, pad_id: int) -> Tensor:
    return model(src, tgt, (src == pad_id)[:, None, :])[0]


def _decode(model: Transformer, src: Tensor, pad_id: int, bos_id: int, eos_id: int, longest: int) -> list[int]:
    return predict(model, src, torch.zeros(1, 1, src.shape[1], dtype=torch.bool), bos_id, eos_id, longest)


ORACLE = Oracle(
    build=_build,
    call=_call,
    decode=_decode,
    raise_logit=add_to_bias("decoder.f.bias"),
    small=lambda length: {"max_length": length},
    lengths_are_free=lambda as_published: not as_published,
    activations=layer_activations(
        "encoder.blocks.block_*.",
        {
            "self_attention.weights": "attention.dropout<",
            "self_attention.output": "attention>",
            "self_attention_residual.output": "addnorm1>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "addnorm2>",
        },
        "decoder.blocks.block_*.",
        {
            "self_attention.weights": "attention1.dropout<",
            "self_attention.output": "attention1>",
            "self_attention_residual.output": "addnorm1>",
            "cross_attention.weights": "attention2.dropout<",
            "cross_attention.output": "attention2>",
            "cross_attention_residual.output": "addnorm2>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "addnorm3>",
        },
        {
            "src_input.output": "encoder.positions>",
            "tgt_input.output": "decoder.positions>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder.f<",
        },
    ),
)
