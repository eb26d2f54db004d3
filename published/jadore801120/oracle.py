"""Oracle of jadore801120."""

import torch
from torch import Tensor

from ...configs.schema import TransformerConfig
from ..oracle import Oracle, layer_activations
from .module import Transformer, translate_sentence


def _build(config: TransformerConfig, as_published: bool, dropout: float) -> Transformer:
    scales = {"prj": config.logit_scale, "emb": config.embedding_scale}
    return Transformer(
        config.src_vocab_size,
        config.tgt_vocab_size,
        config.pad_id,
        config.pad_id,
        d_model=config.d_model,
        d_inner=config.d_ff,
        n_layers=config.num_encoder_layers,
        n_head=config.num_heads,
        d_k=config.query_key_width(config.num_heads),
        d_v=config.value_width(config.num_heads),
        dropout=dropout,
        n_position=config.table_length,
        trg_emb_prj_weight_sharing=config.tied_output,
        emb_src_trg_weight_sharing=config.shared_embeddings,
        scale_emb_or_prj=next((name for name, scale in scales.items() if scale != "none"), "none"),
        as_published=as_published,
    )


def _call(model: Transformer, src: Tensor, tgt: Tensor, pad_id: int) -> Tensor:
    return model(src, tgt).unflatten(0, tgt.shape)


def _decode(model: Transformer, src: Tensor, pad_id: int, bos_id: int, eos_id: int, longest: int) -> list[int]:
    """Decode; the published limit includes the start token."""
    return translate_sentence(model, src, bos_id, eos_id, max_seq_len=longest + 1)[1:]


def _accepts(config: TransformerConfig, as_published: bool) -> bool:
    """Whether there is such a model: without tying, the scale of embeddings depends on the variant only."""
    return config.tied_output or (config.embedding_scale == "none") == as_published


def _raise_logit(model: Transformer, token: int, amount: Tensor) -> None:
    """Raise a logit through the last norm's shift, because the output layer has no bias."""
    row = model.trg_word_prj.weight[token]
    shift = model.decoder.layer_stack[-1].get_submodule("pos_ffn.layer_norm").get_parameter("bias")
    with torch.no_grad():
        shift.add_(amount / model.logit_scale * row / row.square().sum())


ORACLE = Oracle(
    build=_build,
    call=_call,
    decode=_decode,
    accepts=_accepts,
    raise_logit=_raise_logit,
    small=lambda length: {"num_heads": 8, "head_dim": 5, "v_head_dim": 3},
    spread=0.0,  # with a larger scale, some hypotheses of a beam never emit EOS
    activations=layer_activations(
        "encoder.layer_stack.*.",
        {
            "self_attention.weights": "slf_attn.attention_dropout<",
            "self_attention.output": "slf_attn.dropout<",
            "self_attention_residual.output": "slf_attn>",
            "feed_forward.output": "pos_ffn.dropout<",
            "feed_forward_residual.output": "pos_ffn>",
        },
        "decoder.layer_stack.*.",
        {
            "self_attention.weights": "slf_attn.attention_dropout<",
            "self_attention.output": "slf_attn.dropout<",
            "self_attention_residual.output": "slf_attn>",
            "cross_attention.weights": "enc_attn.attention_dropout<",
            "cross_attention.output": "enc_attn.dropout<",
            "cross_attention_residual.output": "enc_attn>",
            "feed_forward.output": "pos_ffn.dropout<",
            "feed_forward_residual.output": "pos_ffn>",
        },
        {
            "src_input.output": "encoder.layer_norm>",
            "tgt_input.output": "decoder.layer_norm>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
)
