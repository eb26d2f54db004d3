"""leftover: gains and shifts are gamma and beta; a layer of the decoder that nothing reads is kept.

The write-up leaves the outer class out, so the first parts of the names may be others than `encoder`, `decoder` and
`projection`.
"""

import re
from collections.abc import Collection
from typing import Any

from ...configs.schema import TransformerConfig
from ..rules import Rule
from .published import Named, PublishedLayout, attention, count, embedding, linear, norm, table


def _attention(ours: str, theirs: str) -> list[Rule]:
    names = {"q_proj": "w_q", "k_proj": "w_k", "v_proj": "w_v", "out_proj": "w_o"}
    return attention(ours, {name: f"{theirs}.{there}" for name, there in names.items()}, bias=True)


def _layer(ours: str, theirs: str, attentions: dict[str, str]) -> list[Rule]:
    rules = []
    for number, (name, there) in enumerate(attentions.items(), start=1):
        rules += _attention(f"{ours}.{name}", f"{theirs}.{there}")
        rules += norm(f"{ours}.{name}_residual.norm", f"{theirs}.layer_norm{number}", "gamma", "beta")
    rules += linear(f"{ours}.feed_forward.inner_proj", f"{theirs}.ffn.fc1")
    rules += linear(f"{ours}.feed_forward.outer_proj", f"{theirs}.ffn.fc2")
    last = f"{theirs}.layer_norm{len(attentions) + 1}"
    return rules + norm(f"{ours}.feed_forward_residual.norm", last, "gamma", "beta")


def _rules(config: TransformerConfig) -> list[Rule]:
    rules = [*linear("output.proj", "projection.proj", bias=False), Rule(("output.bias",), ("projection.proj.bias",))]
    for side, stack in (("src", "encoder"), ("tgt", "decoder")):
        rules.append(embedding(f"{side}_embedding", f"{stack}.input_embedding.embedding.weight"))
        rules.append(table(side, f"{stack}.pos_embedding.pe"))
    for i in range(config.num_encoder_layers):
        names = {"self_attention": "multi_head_attention"}
        rules += _layer(f"encoder.layers.{i}", f"encoder.encoder_blocks.{i}", names)
    for i in range(config.num_decoder_layers):
        names = {"self_attention": "multi_head_attention1", "cross_attention": "cross_attention"}
        rules += _layer(f"decoder.layers.{i}", f"decoder.decoder_layers.{i}", names)
    return rules


def _fields(arrays: Named, as_published: bool) -> dict[str, Any]:
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
    """What stands for `encoder`, `decoder` and `projection` in these names."""
    found = {}
    for part, pattern in {
        "encoder": r"(.+)\.encoder_blocks\.\d+\..*",
        "decoder": r"(.+)\.decoder_layers\.\d+\..*",
        "projection": r"(.+)\.proj\.weight",
    }.items():
        prefixes = {match[1] for name in names if (match := re.fullmatch(pattern, name))}
        prefixes -= set(found.values())  # the decoder has a layer `proj` of its own
        if len(prefixes) == 1:
            found[part] = prefixes.pop()
    return found


LAYOUT = PublishedLayout(
    _rules,
    _fields,
    mark=r".+\.encoder_blocks\.0\..*",
    parts=("encoder", "decoder", "projection"),
    unused=r"decoder\.proj\.(weight|bias)",
    prefixes=_prefixes,
)
