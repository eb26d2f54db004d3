"""CTranslate2's `TransformerSpec`: names of its variables, and the configs that it can express.

Projections of one input are fused, and a shared embedding table has aliases. A parameter that every CTranslate2 model
has and the config lacks, such as the shift of a layer norm, gets the value that changes nothing.
Source: `ctranslate2.specs.TransformerSpec`, revision 7; `src/layers/transformer.cc` for what each variable does.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig
from ...formulas.decoding import without_cache
from ...formulas.relative_positions import relative_position_buckets
from ..port import flax_specs
from ..rules import IDENTITY, TRANSPOSE, Rule, Transform, target_specs, translate

Arrays = dict[str, np.ndarray]
_ACTIVATIONS = {"relu": 0, "gelu_tanh": 1, "silu": 2, "gelu": 3}  # `specs.common_spec.Activation`
_INPUTS = {"encoder": ("src_input", "embeddings_0"), "decoder": ("tgt_input", "embeddings")}
_TABLE = "position_encodings/encodings"
_BIAS = "self_attention/relative_attention_bias"
# field -> (supported values, the reason)
_ALLOWED = {
    "norm": (("layer_norm", "rms_norm"), "CTranslate2 has no other norm"),
    "output_activation": (("none", "log_softmax"), "CTranslate2 computes the log-softmax of the logits"),
    "cross_mask": (("source",), "the model cannot be decoded otherwise"),
    "cross_attention_residual": (("add",), "CTranslate2 adds the output of every attention"),
    "param_dtype": (("float32", "float16", "bfloat16"), "CTranslate2 does not store other floating-point numbers"),
}


def check(config: TransformerConfig) -> None:
    """Raises: ConversionError, lists every field with a value that CTranslate2 cannot express."""
    if problems := [*_problems(config)]:
        raise ConversionError("CTranslate2 has no such model:\n  " + "\n  ".join(problems))


def write(config: TransformerConfig, arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, dict[str, str]]:
    """(variables by name, aliases with the name of their variable).

    Raises:
        ConversionError: lists every field with a value that CTranslate2 cannot express, or the arrays that do not fit.
    """
    check(config)
    return translate(rules_of(config), arrays, flax_specs(config)) | _constants(config), _aliases(config)


def read(config: TransformerConfig, variables: Mapping[str, np.ndarray]) -> Arrays:
    """The arrays by Flax name; rows of position tables that no token can have are 0.

    Raises:
        ConversionError: lists the variables that do not fit the config.
    """
    rules, constants = rules_of(config), _constants(config)
    specs = target_specs(rules, flax_specs(config))
    learned = {name: array for name, array in variables.items() if name not in constants or name in specs}
    return translate([rule.inverse for rule in rules], learned, specs)


def rules_of(config: TransformerConfig) -> list[Rule]:
    """The rules from Flax names to the variables that hold trained values or tables."""
    rules = [Rule(("src_embedding.embedding",), (_source_table(config),))]
    rules += [] if config.shared_embeddings else [Rule(("tgt_embedding.embedding",), ("decoder/embeddings/weight",))]
    for side, count in _layers(config):
        path, name = _INPUTS[side][0], f"{side}/layernorm_embedding"
        rules += [Rule((f"{path}.positions.table",), (f"{side}/{_TABLE}",), _rows(config))] * (
            config.positions != "none"
        )
        rules += _norm(config, f"{path}.norm", name) if config.embedding_norm != "none" else []
        rules += _norm(config, f"{side}.final_norm", f"{side}/layer_norm") if config.final_norm else []
        tables = {"shared": [f"{side}."], "per_layer": [f"{side}.layers.{i}." for i in range(count)]}
        for i, table in enumerate(tables.get(config.relative_positions, [])):
            rules.append(Rule((f"{table}relative_positions.embedding",), (f"{side}/layer_{i}/{_BIAS}",)))
        for i in range(count):
            rules += _layer(config, f"{side}.layers.{i}", f"{side}/layer_{i}", side == "decoder")
    if not config.tied_output:
        rules.append(Rule(("output.proj.kernel",), ("decoder/projection/weight",), TRANSPOSE))
    return rules + [Rule(("output.bias",), ("decoder/projection/bias",))] * (config.output_bias != "none")


def _layer(config: TransformerConfig, path: str, name: str, is_decoder: bool) -> list[Rule]:
    rules = []
    parts = {"self_attention": ("self_attention", ("qkv",))}
    parts |= {"cross_attention": ("attention", ("q", "kv"))} if is_decoder else {}
    for module, (target, groups) in parts.items():
        attention, target = f"{path}.{module}", f"{name}/{target}"
        for number, letters in enumerate(groups):
            rules += _fused(config, attention, letters, f"{target}/linear_{number}")
        rules += _linear(f"{attention}.out_proj", f"{target}/linear_{len(groups)}", config.out_proj_bias)
        rules += _norm(config, f"{attention}_residual.norm", f"{target}/layer_norm")
    gated = {"inner_proj": "linear_0_noact", "gate_proj": "linear_0"}
    projections = (gated if config.ffn_gate else {"inner_proj": "linear_0"}) | {"outer_proj": "linear_1"}
    for module, target in projections.items():
        rules += _linear(f"{path}.feed_forward.{module}", f"{name}/ffn/{target}", config.ffn_bias)
    return rules + _norm(config, f"{path}.feed_forward_residual.norm", f"{name}/ffn/layer_norm")


def _linear(path: str, name: str, has_bias: bool) -> list[Rule]:
    rules = [Rule((f"{path}.kernel",), (f"{name}/weight",), TRANSPOSE)]
    return rules + [Rule((f"{path}.bias",), (f"{name}/bias",))] * has_bias


def _fused(config: TransformerConfig, path: str, letters: str, name: str) -> list[Rule]:
    """The rules of projections q, k or v that CTranslate2 stores as one matrix, whose missing biases are 0."""
    modules = [f"{path}.{letter}_proj" for letter in letters]
    has_bias = [getattr(config, f"{letter}_proj_bias") for letter in letters]
    kernels, biases = (tuple(f"{module}.{leaf}" for module in modules) for leaf in ("kernel", "bias"))
    rules = [Rule(kernels, (f"{name}/weight",), _pack_kernels(len(letters)))]
    if any(has_bias):
        sources = tuple(bias for bias, exists in zip(biases, has_bias, strict=True) if exists)
        rules.append(Rule(sources, (f"{name}/bias",), _pack_biases(has_bias)))
    return rules


def _pack_kernels(count: int) -> Transform:
    return Transform(
        lambda arrays: [np.concatenate([a.T for a in arrays])],
        lambda arrays: [a.T for a in np.split(arrays[0], count)],
    )


def _pack_biases(exists: Sequence[bool]) -> Transform:
    def pack(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        biases = iter(arrays)
        return [np.concatenate([next(biases) if flag else np.zeros_like(arrays[0]) for flag in exists])]

    def unpack(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [part for part, flag in zip(np.split(arrays[0], len(exists)), exists, strict=True) if flag]

    return Transform(pack, unpack)


def _norm(config: TransformerConfig, path: str, name: str) -> list[Rule]:
    rules = [Rule((f"{path}.scale",), (f"{name}/gamma",))] * config.norm_scale
    return rules + [Rule((f"{path}.bias",), (f"{name}/beta",))] * config.norm_bias


def _rows(config: TransformerConfig) -> Transform:
    """The rows of a position table that a token can have; CTranslate2 counts positions from row 0."""
    first, last = config.position_offset, config.position_offset + config.max_length
    if config.table_length == config.max_length:
        return IDENTITY
    widths = ((first, config.table_length - last), (0, 0))
    return Transform(lambda arrays: [arrays[0][first:last]], lambda arrays: [np.pad(arrays[0], widths)])


def _layers(config: TransformerConfig) -> tuple[tuple[str, int], ...]:
    return ("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)


def _source_table(config: TransformerConfig) -> str:
    return "decoder/embeddings/weight" if config.shared_embeddings else "encoder/embeddings_0/weight"


def _aliases(config: TransformerConfig) -> dict[str, str]:
    """The names of variables that are stored once, with the name under which they are stored."""
    table = "decoder/embeddings/weight"
    aliases = {"encoder/embeddings_0/weight": table} if config.shared_embeddings else {}
    aliases |= {"decoder/projection/weight": table} if config.tied_output else {}
    if config.relative_positions == "shared":
        for side, count in _layers(config):
            aliases |= {f"{side}/layer_{i}/{_BIAS}": f"{side}/layer_0/{_BIAS}" for i in range(1, count)}
    return aliases


def _constants(config: TransformerConfig) -> Arrays:
    """The variables that follow from the config: attributes, and arrays of 0 or 1 for parameters that it lacks."""
    values: Arrays = {}
    for side, count in _layers(config):
        heads = config.num_heads if side == "encoder" else config.decoder_num_heads or config.num_heads
        values |= {f"{side}/num_heads": np.array(heads, np.int16)}
        flags = {"pre_norm": config.norm_placement == "pre", "scale_embeddings": config.embedding_scale != "none"}
        values |= {f"{side}/{name}": np.array(flag, np.int8) for name, flag in flags.items()}
        values[f"{side}/activation"] = np.array(_ACTIVATIONS[config.activation], np.int8)
        for i, attention in product(range(count), ("self_attention", "attention")):
            if attention == "self_attention" or side == "decoder":
                values |= _attention_constants(config, f"{side}/layer_{i}/{attention}", heads)
        if config.positions == config.relative_positions == "none":
            values[f"{side}/{_TABLE}"] = np.zeros((config.max_length, config.d_model), config.param_dtype)
        for name in _norm_names(config, side, count):
            values |= {} if config.norm_scale else {f"{name}/gamma": np.ones(config.d_model, config.param_dtype)}
            if config.norm == "layer_norm" and not config.norm_bias:
                values[f"{name}/beta"] = np.zeros(config.d_model, config.param_dtype)
    values |= {f"encoder/{name}": np.array(0, np.int8) for name in ("embeddings_merge", "multi_query_attention")}
    alibi = ("alibi", "alibi_use_positive_positions", "scale_alibi")
    values |= {f"decoder/{name}": np.array(0, np.int8) for name in alibi}
    values |= {"decoder/alignment_layer": np.array(-1, np.int16), "decoder/alignment_heads": np.array(1, np.int16)}
    values["decoder/start_from_zero_embedding"] = np.array(config.decoder_start == "zero_embedding", np.int8)
    if config.logit_scale != "none":
        values["decoder/scale_outputs"] = np.array(config.d_model**-0.5, np.float32)
    return values


def _attention_constants(config: TransformerConfig, name: str, heads: int) -> Arrays:
    values: Arrays = {}
    if heads * config.query_key_width(heads) != config.d_model:
        values[f"{name}/head_dim"] = np.array(config.query_key_width(heads), np.int32)
    if config.score_scaling == "none":
        values[f"{name}/queries_scale"] = np.array(1, np.float32)
    if config.relative_positions != "none" and name.endswith("self_attention"):
        distance = np.array(config.relative_position_max_distance, np.int32)
        values[f"{name}/relative_attention_max_distance"] = distance
    return values


def _norm_names(config: TransformerConfig, side: str, count: int) -> Iterator[str]:
    sublayers = ("self_attention", "ffn", *(["attention"] if side == "decoder" else []))
    yield from (f"{side}/layer_{i}/{sublayer}/layer_norm" for i in range(count) for sublayer in sublayers)
    yield from [f"{side}/layer_norm"] * config.final_norm
    yield from [f"{side}/layernorm_embedding"] * (config.embedding_norm != "none")


def _problems(config: TransformerConfig) -> Iterator[str]:
    """One line per field with a value that CTranslate2 cannot express."""
    for name, (allowed, reason) in _ALLOWED.items():
        if (value := getattr(config, name)) not in allowed:
            yield f"{name}={value!r}: must be {' or '.join(map(repr, allowed))}, because {reason}"
    if config.norm != "layer_norm_over_length" and (reason := without_cache(config)):
        yield reason
    if config.position_counting == "non_padding" and config.decoder_start_id == config.pad_id:
        yield "position_counting='non_padding': CTranslate2 counts the start token, which has the pad id"
    if config.norm == "rms_norm" and config.norm_bias:
        yield "norm_bias=True: CTranslate2's rms_norm has no shift"
    heads = (config.num_heads, config.decoder_num_heads or config.num_heads)
    if any(config.value_width(n) != config.query_key_width(n) for n in heads):
        yield f"v_head_dim={config.v_head_dim}: CTranslate2's heads have one width for queries, keys and values"
    if config.relative_positions != "none":
        if config.positions != "none":
            yield f"positions={config.positions!r}: CTranslate2 has no positions besides relative ones"
        if not _has_same_buckets(config):
            buckets, distance = config.relative_position_buckets, config.relative_position_max_distance
            yield (
                f"relative_position_buckets={buckets}, relative_position_max_distance={distance}: float32 logarithms, "
                "with which CTranslate2 computes the buckets, put a distance into another one"
            )


def _has_same_buckets(config: TransformerConfig) -> bool:
    """Whether CTranslate2 computes the same buckets of relative positions. Source: `src/layers/attention.cc`."""
    count, longest = config.relative_position_buckets, config.relative_position_max_distance
    for bidirectional in (True, False):
        n = count // 2 if bidirectional else count
        exact, f32 = n // 2, np.float32
        distances = np.arange(longest + 1)
        ratios = np.maximum(distances, 1).astype(f32) / f32(exact), np.array(longest, f32) / f32(exact)
        logarithms = [np.log(ratio.astype(float)).astype(f32) for ratio in ratios]  # logf rounds correctly
        scaled = (f32(exact) + logarithms[0] / logarithms[1] * f32(n - exact)).astype(int)
        buckets = np.where(distances < exact, distances, np.minimum(scaled, n - 1))
        if (relative_position_buckets(count, longest, bidirectional)[: longest + 1][::-1] != buckets).any():
            return False
    return True
