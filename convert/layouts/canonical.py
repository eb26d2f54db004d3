"""One config for every config of the same model, so that configs of two layouts can be compared."""

from dataclasses import fields
from typing import Any

from ...configs.schema import TransformerConfig


def canonical(config: TransformerConfig) -> TransformerConfig:
    """The same model, with the default for every size that equals the default or that nothing uses."""
    heads = {config.num_heads, config.decoder_num_heads or config.num_heads}
    changes: dict[str, Any] = {}
    if config.decoder_num_heads == config.num_heads:
        changes["decoder_num_heads"] = None
    if config.decoder_d_ff == config.d_ff:
        changes["decoder_d_ff"] = None
    if all(config.value_width(n) == config.query_key_width(n) for n in heads):
        changes["v_head_dim"] = None
    if all(n * config.query_key_width(n) == config.d_model for n in heads):
        changes["head_dim"] = None
    if config.table_length == config.max_length + config.position_offset:
        changes["position_table_length"] = None
    if config.relative_positions == "none":
        unused = ("relative_position_buckets", "relative_position_max_distance")
        changes |= {f.name: f.default for f in fields(config) if f.name in unused}
    return config.replace(**changes)


def up_to_rounding(config: TransformerConfig) -> TransformerConfig:
    """The canonical config, with one value for the two of `score_scaling` that differ in rounding only."""
    return canonical(config).replace(score_scaling="none" if config.score_scaling == "none" else "product")
