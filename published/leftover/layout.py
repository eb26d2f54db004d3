"""Layout of leftover: gains and shifts are gamma and beta; the decoder's unused layer is preserved.

The write-up omits the outer class, so the prefixes of the names may differ from `encoder`, `decoder` and `projection`.
"""

import re
from collections.abc import Collection
from typing import Any

from ...configs.schema import TransformerConfig
from ...convert.layouts.published import LayerNames, Named, PublishedLayout, count, embedding, linear, table
from ...convert.rules import Rule

_LAYER = LayerNames(("w_q", "w_k", "w_v", "w_o"), True, "ffn.fc1", "ffn.fc2", "layer_norm#", gain="gamma", shift="beta")


def _rules(config: TransformerConfig) -> list[Rule]:
    rules = [*linear("output.proj", "projection.proj", bias=False), Rule(("output.bias",), ("projection.proj.bias",))]
    for side, stack in (("src", "encoder"), ("tgt", "decoder")):
        rules.append(embedding(f"{side}_embedding", f"{stack}.input_embedding.embedding.weight"))
        rules.append(table(side, f"{stack}.pos_embedding.pe"))
    for i in range(config.num_encoder_layers):
        names = {"self_attention": "multi_head_attention"}
        rules += _LAYER.rules(f"encoder.layers.{i}", f"encoder.encoder_blocks.{i}", names)
    for i in range(config.num_decoder_layers):
        names = {"self_attention": "multi_head_attention1", "cross_attention": "cross_attention"}
        rules += _LAYER.rules(f"decoder.layers.{i}", f"decoder.decoder_layers.{i}", names)
    return rules


def _fields(arrays: Named, as_published: bool, heads: int) -> dict[str, Any]:
    src, d_model = arrays["encoder.input_embedding.embedding.weight"].shape
    return {
        "src_vocab_size": src,
        "tgt_vocab_size": arrays["decoder.input_embedding.embedding.weight"].shape[0],
        "d_model": d_model,
        "d_ff": arrays["encoder.encoder_blocks.0.ffn.fc1.weight"].shape[0],
        "num_encoder_layers": count(arrays, "encoder.encoder_blocks.#."),
        "num_decoder_layers": count(arrays, "decoder.decoder_layers.#."),
        "max_length": arrays["encoder.pos_embedding.pe"].shape[1],
    }


def _prefixes(names: Collection[str]) -> dict[str, str]:
    """The prefixes in these names that correspond to `encoder`, `decoder` and `projection`."""
    prefix_of = {}
    for part, pattern in {
        "encoder": r"(.+)\.encoder_blocks\.\d+\..*",
        "decoder": r"(.+)\.decoder_layers\.\d+\..*",
        "projection": r"(.+)\.proj\.weight",
    }.items():
        prefixes = {match[1] for name in names if (match := re.fullmatch(pattern, name))}
        prefixes -= set(prefix_of.values())  # the decoder has a layer `proj` too
        if len(prefixes) == 1:
            prefix_of[part] = prefixes.pop()
    return prefix_of


LAYOUT = PublishedLayout(
    _rules,
    _fields,
    mark=r".+\.encoder_blocks\.0\..*",
    parts=("encoder", "decoder", "projection"),
    unused=r"decoder\.proj\.(weight|bias)",
    prefixes=_prefixes,
)
