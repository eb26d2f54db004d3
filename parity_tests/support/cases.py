"""The settings and sizes at which parity is proven: all pairs of setting values, on small sizes."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from allpairspy import AllPairs

from twinax.configs.schema import TransformerConfig

# Distinct sizes, so that swapped dimensions fail; num_heads divides d_model because head_dim may be None.
SIZES: dict[str, list[Any]] = {
    "src_vocab_size": [31],
    "tgt_vocab_size": [29],
    "d_model": [14, 21],
    "num_heads": [7],
    "decoder_num_heads": [None, 1],
    "head_dim": [None, 5],
    "v_head_dim": [None, 3],
    "d_ff": [23],
    "decoder_d_ff": [None, 17],
    "num_encoder_layers": [1, 2],
    "num_decoder_layers": [1],
    "max_length": [11],
    "norm_eps": [1e-5, 1e-3],
    "position_offset": [0, 2],
    "position_table_length": [None, 19],
    "relative_position_buckets": [32, 6],
    "relative_position_max_distance": [128, 17],
    "mask_value": ["exact", -1e9, -1.5],
    "embedding_dropout": [0.0, 0.3],
    "attention_dropout": [0.0, 0.4],
    "ffn_dropout": [0.0, 0.2],
    "residual_dropout": [0.0, 0.1],
    "final_dropout": [0.0, 0.2],
    "encoder_layerdrop": [0.0, 0.5],
    "decoder_layerdrop": [0.0, 0.5],
    "pad_id": [0, 3],
}
# The forward pass reads no initializers or special ids; dtypes are the ladder's columns; PyTorch has only one
# dropout generator.
NOT_VARIED = {
    "linear_init",
    "dropout_generator",
    "embedding_init",
    "bos_id",
    "eos_id",
    "decoder_start_id",
    "forced_bos_id",
    "forced_eos_id",
    "param_dtype",
    "compute_dtype",
}
# Inputs besides the config: explicit masks and dropout.
INPUTS: dict[str, list[bool]] = {"src_mask": [False, True], "tgt_mask": [False, True], "dropout": [False, True]}


def factors() -> dict[str, list[Any]]:
    """Test values per setting: all choices of a Literal, both booleans, or those in `SIZES`."""
    hints = get_type_hints(TransformerConfig)
    values: dict[str, list[Any]] = {}
    for field in fields(TransformerConfig):
        if field.name in NOT_VARIED:
            continue
        if field.name in SIZES:
            values[field.name] = SIZES[field.name]
        elif get_origin(hints[field.name]) is Literal:
            values[field.name] = list(get_args(hints[field.name]))
        else:
            assert hints[field.name] is bool, f"{field.name}: give cases.SIZES values for it"
            values[field.name] = [False, True]
    return values | INPUTS


def pairwise() -> list[tuple[TransformerConfig, dict[str, bool]]]:
    """Pairs of (config, inputs) that cover every combination of values of any two settings."""
    names = list(factors())
    rows = [dict(zip(names, row, strict=True)) for row in AllPairs(list(factors().values()))]
    cases = []
    for row in rows:
        inputs = {name: row.pop(name) for name in INPUTS}
        if row["shared_embeddings"]:
            row["tgt_vocab_size"] = row["src_vocab_size"]
        cases.append((TransformerConfig(**row, param_dtype="float64", compute_dtype="float64"), inputs))
    return cases
