"""Layout of d2l_note: attention has no biases. The file lacks position tables; the config gives their length."""

from typing import Any

import numpy as np

from ...configs.schema import TransformerConfig
from ...convert.layouts.published import IDS, LayerNames, Named, PublishedLayout, count, embedding, linear
from ...convert.rules import Rule

_LAYER = LayerNames(("W_q", "W_k", "W_v", "W_o"), False, "ffn.s.0", "ffn.s.2", "addnorm#.ln")


def _rules(config: TransformerConfig) -> list[Rule]:
    rules = [embedding("src_embedding", "encoder.embedding.weight")]
    rules.append(embedding("tgt_embedding", "decoder.embedding.weight"))
    rules += [*linear("output.proj", "decoder.f", bias=False), Rule(("output.bias",), ("decoder.f.bias",))]
    for i in range(config.num_encoder_layers):
        rules += _LAYER.rules(f"encoder.layers.{i}", f"encoder.blocks.block_{i}", {"self_attention": "attention"})
    for i in range(config.num_decoder_layers):
        names = {"self_attention": "attention1", "cross_attention": "attention2"}
        rules += _LAYER.rules(f"decoder.layers.{i}", f"decoder.blocks.block_{i}", names)
    return rules


def _fields(arrays: Named, as_published: bool, heads: int) -> dict[str, Any]:
    src, d_model = arrays["encoder.embedding.weight"].shape
    return {
        "src_vocab_size": src,
        "tgt_vocab_size": arrays["decoder.embedding.weight"].shape[0],
        "d_model": d_model,
        "d_ff": arrays["encoder.blocks.block_0.ffn.s.0.weight"].shape[0],
        "num_encoder_layers": count(arrays, "encoder.blocks.block_#."),
        "num_decoder_layers": count(arrays, "decoder.blocks.block_#."),
    }


def _tables(config: TransformerConfig) -> dict[str, np.ndarray]:
    """The position tables, computed by PyTorch in float32 as published, because other libraries' sines differ."""
    from .module import position_table

    values = position_table(config.table_length, config.d_model).numpy().astype(config.param_dtype)
    return {f"{side}_input.positions.table": values for side in ("src", "tgt")}


LAYOUT = PublishedLayout(
    _rules,
    _fields,
    mark=r"encoder\.blocks\.block_0\..*",
    tables=_tables,
    undetermined=lambda config: ("num_heads", "max_length", *IDS),
)
