"""Oracle of leftover."""

from torch import Tensor

from ...configs.schema import TransformerConfig
from ..oracle import Oracle, add_to_bias, layer_activations, sizes_of
from .module import Transformer, greedy_decode, make_masks


def _build(config: TransformerConfig, as_published: bool, dropout: float) -> Transformer:
    sizes = sizes_of(config, as_published, dropout)
    vocabularies = config.src_vocab_size, config.tgt_vocab_size
    return Transformer(*vocabularies, seq_len=config.table_length, pad=config.pad_id, **sizes)


def _call(model: Transformer, src: Tensor, tgt: Tensor, pad_id: int) -> Tensor:
    return model(src, tgt, *make_masks(src, tgt, pad_id, model.projection.as_published))


def _decode(model: Transformer, src: Tensor, pad_id: int, bos_id: int, eos_id: int, longest: int) -> list[int]:
    """Decode; the limit is the number of positions and includes the start token."""
    positions = model.get_buffer("decoder.pos_embedding.pe").shape[1]
    return greedy_decode(model, src, pad_id, bos_id, eos_id, positions)[1:]


ORACLE = Oracle(
    build=_build,
    call=_call,
    decode=_decode,
    raise_logit=add_to_bias("projection.proj.bias"),
    small=lambda length: {"max_length": length},
    activations=layer_activations(
        "encoder.encoder_blocks.*.",
        {
            "self_attention.weights": "multi_head_attention.dropout<",
            "self_attention.output": "multi_head_attention>",
            "self_attention_residual.output": "layer_norm1>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "layer_norm2>",
        },
        "decoder.decoder_layers.*.",
        {
            "self_attention.weights": "multi_head_attention1.dropout<",
            "self_attention.output": "multi_head_attention1>",
            "self_attention_residual.output": "layer_norm1>",
            "cross_attention.weights": "cross_attention.dropout<",
            "cross_attention.output": "cross_attention>",
            "cross_attention_residual.output": "layer_norm2>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "layer_norm3>",
        },
        {
            "src_input.output": "encoder.pos_embedding>",
            "tgt_input.output": "decoder.pos_embedding>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
)
