"""Layout of lucky_glass: one matrix (in, out) per head and projection; one position table for both sides."""

from typing import Any

import numpy as np

from ...configs.schema import TransformerConfig
from ...convert.layouts.published import IDS, Named, PublishedLayout, count, embedding, linear, one_table
from ...convert.rules import Rule, Transform


def _heads(number: int) -> Transform:
    """(D, N·H) <-> N matrices (D, H)."""
    return Transform(
        lambda arrays: np.split(arrays[0], number, axis=1), lambda arrays: [np.concatenate(list(arrays), axis=1)]
    )


def _attention(source: str, target: str, heads: int) -> list[Rule]:
    rules = [
        Rule((f"{source}.{name}.kernel",), tuple(f"{target}.attentions.{j}.{w}" for j in range(heads)), _heads(heads))
        for name, w in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv"))
    ]
    return [*rules, Rule((f"{source}.out_proj.kernel",), (f"{target}.wo",))]


def _rules(config: TransformerConfig) -> list[Rule]:
    heads = config.num_heads
    rules = [embedding(f"{side}_embedding", f"{side}_tok_embed.embedding.weight") for side in ("src", "tgt")]
    rules += [one_table("pos_embed.additive"), *linear("output.proj", "linear", bias=False)]
    rules.append(Rule(("output.bias",), ("linear.bias",)))
    for stack, number in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        for layer in (f"{stack}.layers.{i}" for i in range(number)):
            name = "attention" if stack == "encoder" else "masked_attention"
            rules += _attention(f"{layer}.self_attention", f"{layer}.{name}", heads)
            if stack == "decoder":
                rules += _attention(f"{layer}.cross_attention", f"{layer}.attention", heads)
            rules += linear(f"{layer}.feed_forward.inner_proj", f"{layer}.feed_forward.linear1")
            rules += linear(f"{layer}.feed_forward.outer_proj", f"{layer}.feed_forward.linear2")
    return rules


def _fields(arrays: Named, as_published: bool, heads: int) -> dict[str, Any]:
    src, d_model = arrays["src_tok_embed.embedding.weight"].shape
    return {
        "src_vocab_size": src,
        "tgt_vocab_size": arrays["tgt_tok_embed.embedding.weight"].shape[0],
        "d_model": d_model,
        "num_heads": count(arrays, "encoder.layers.0.attention.attentions.#.wq"),
        "d_ff": arrays["encoder.layers.0.feed_forward.linear1.weight"].shape[0],
        "num_encoder_layers": count(arrays, "encoder.layers.#."),
        "num_decoder_layers": count(arrays, "decoder.layers.#."),
        "max_length": arrays["pos_embed.additive"].shape[0],
    }


LAYOUT = PublishedLayout(_rules, _fields, mark=r"pos_embed\.additive", undetermined=lambda config: IDS)
