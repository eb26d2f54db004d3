"""Layout of annotated_transformer: projections are numbered q, k, v, output; gains and shifts are a_2 and b_2."""

from typing import Any

from ...configs.schema import TransformerConfig
from ...convert.layouts.published import LayerNames, Named, PublishedLayout, count, embedding, linear, norm, table
from ...convert.rules import Rule

_LAYER = LayerNames(
    ("linears.0", "linears.1", "linears.2", "linears.3"),
    True,
    "feed_forward.w_1",
    "feed_forward.w_2",
    "sublayer.#.norm",
    first=0,
    gain="a_2",
    shift="b_2",
)


def _rules(config: TransformerConfig) -> list[Rule]:
    rules = [*linear("output.proj", "generator.proj", bias=False), Rule(("output.bias",), ("generator.proj.bias",))]
    for side, stack in (("src", "encoder"), ("tgt", "decoder")):
        rules += [embedding(f"{side}_embedding", f"{side}_embed.0.lut.weight"), table(side, f"{side}_embed.1.pe")]
        rules += norm(f"{stack}.final_norm", f"{stack}.norm", "a_2", "b_2")
    for i in range(config.num_encoder_layers):
        rules += _LAYER.rules(f"encoder.layers.{i}", f"encoder.layers.{i}", {"self_attention": "self_attn"})
    for i in range(config.num_decoder_layers):
        rules += _LAYER.rules(
            f"decoder.layers.{i}", f"decoder.layers.{i}", {"self_attention": "self_attn", "cross_attention": "src_attn"}
        )
    return rules


def _fields(arrays: Named, as_published: bool, heads: int) -> dict[str, Any]:
    src, d_model = arrays["src_embed.0.lut.weight"].shape
    return {
        "src_vocab_size": src,
        "tgt_vocab_size": arrays["tgt_embed.0.lut.weight"].shape[0],
        "d_model": d_model,
        "d_ff": arrays["encoder.layers.0.feed_forward.w_1.weight"].shape[0],
        "num_encoder_layers": count(arrays, "encoder.layers.#."),
        "num_decoder_layers": count(arrays, "decoder.layers.#."),
        "max_length": arrays["src_embed.1.pe"].shape[1],
    }


LAYOUT = PublishedLayout(_rules, _fields, mark=r"generator\.proj\.weight")
