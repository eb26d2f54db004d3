"""fairseq's `transformer` models: settings, names of arrays, and the names that older versions wrote.

Positions start after the pad id and do not count padding; decoding starts with EOS.
Source: Ott et al. 2019, "fairseq: A Fast, Extensible Toolkit for Sequence Modeling"; `models/transformer`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..io.untrusted import check_declared_size
from ..port import flax_specs
from ..rules import Rule, target_specs, translate
from .canonical import canonical
from .fairseq_settings import ACTIVATIONS, ARCHITECTURES, DEFAULTS, EQUAL, REFUSED, SETTINGS
from .families.m2m100 import position_table
from .foreign import check_layers, check_restored, errors_by_setting, not_written, rules_by_module
from .hugging_face import EMBEDDING_NORMS, FINAL_NORMS, LAYERS, POSITIONS

Arrays = dict[str, np.ndarray]
Settings = Mapping[str, Any]
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 of every dictionary
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT = "decoder.output_projection.weight"
VERSIONS = ("encoder.version", "decoder.version")
_VERSION = 3  # earlier decoders had no final norm
_FLOAT = "embed_positions._float_tensor"  # an array without content, of fixed positions
_MODULES = {flax: name.removeprefix("model.") for flax, name in (LAYERS | EMBEDDING_NORMS | FINAL_NORMS).items()}
_MODULES |= {
    "src_embedding": SOURCE.removesuffix(".weight"),
    "tgt_embedding": TARGET.removesuffix(".weight"),
    "output.proj": OUTPUT.removesuffix(".weight"),
}
_LEARNED = {flax: name.removeprefix("model.") for flax, name in POSITIONS.items()}
_FIXED: dict[str, Any] = {  # config fields that are the same for every model
    **{"pad_id": 1, "bos_id": 0, "eos_id": 2, "decoder_start_id": 2},
    **{"embedding_padding": "frozen", "decoder_mask": "causal_and_padding", "position_counting": "non_padding"},
    "output_bias": "none",
}
# Arrays that layers of fairseq 0.12 register for torch's fast path. Loading fills them with the weights of the layer.
FAST_PATH = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def config_of(settings: Settings, sizes: tuple[int, int], dtype: str) -> TransformerConfig:
    """The config of a model with these settings, vocabulary sizes (source, target) and dtype.

    Raises:
        ConversionError: lists every setting that twinax does not support.
    """
    complete = _complete(settings)
    if problems := [*_problems(complete)]:
        raise ConversionError("fairseq settings that twinax rejects:\n  " + "\n  ".join(problems))
    values = {field: complete[name] for name, field in SETTINGS.items()}
    values |= {"embedding_dropout": complete["dropout"], "residual_dropout": complete["dropout"]}
    values |= {"activation": ACTIVATIONS[complete["activation_fn"]], **_FIXED}
    pre_norm = bool(complete["encoder_normalize_before"])
    values |= {"norm_placement": "pre" if pre_norm else "post", "final_norm": pre_norm}
    values["embedding_norm"] = "before_dropout" if complete["layernorm_embedding"] else "none"
    values["embedding_scale"] = "none" if complete["no_scale_embedding"] else "sqrt_d_model"
    shared = bool(complete["share_all_embeddings"])
    values["tied_output"] = shared or bool(complete["share_decoder_input_output_embed"])
    values["shared_embeddings"] = shared or bool(complete["merge_src_tgt_embed"])
    values["positions"] = "learned" if complete["encoder_learned_pos"] else "sinusoidal_half_t2t"
    values["position_offset"] = _FIXED["pad_id"] + 1
    if complete["no_token_positional_embeddings"]:
        values |= {"positions": "none", "position_offset": 0}
    src_size, tgt_size = sizes
    values |= {"src_vocab_size": src_size, "tgt_vocab_size": tgt_size, "param_dtype": dtype, "compute_dtype": dtype}
    names = {field: name for name, field in SETTINGS.items()} | {"embedding_dropout": "dropout"}
    with errors_by_setting("fairseq settings", lambda field: names.get(field, field)):
        return canonical(TransformerConfig(**values))


def settings_of(config: TransformerConfig) -> dict[str, Any]:
    """The settings of a config. Raises: ConversionError, lists every field with a value that no fairseq model has."""
    settings: dict[str, Any] = {name: getattr(config, field) for name, field in SETTINGS.items()}
    settings["decoder_attention_heads"] = config.decoder_num_heads or config.num_heads
    settings["decoder_ffn_embed_dim"] = config.decoder_d_ff or config.d_ff
    settings |= dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), config.d_model)
    settings |= {"max_target_positions": config.max_length, "dropout": config.residual_dropout}
    settings["activation_fn"] = next(name for name, value in ACTIVATIONS.items() if value == config.activation)
    for side in ("encoder", "decoder"):
        settings[f"{side}_normalize_before"] = config.norm_placement == "pre"
        settings[f"{side}_learned_pos"] = config.positions == "learned"
    settings["no_token_positional_embeddings"] = config.positions == "none"
    settings["no_scale_embedding"] = config.embedding_scale == "none"
    settings["layernorm_embedding"] = config.embedding_norm != "none"
    shared, tied = config.shared_embeddings, config.tied_output
    settings |= {"share_all_embeddings": shared and tied, "share_decoder_input_output_embed": tied}
    settings |= {"merge_src_tgt_embed": shared and not tied, "relu_dropout": config.ffn_dropout, "arch": "transformer"}
    restored = config_of(settings, (config.src_vocab_size, config.tgt_vocab_size), config.param_dtype)
    check_restored(canonical(config), restored, "fairseq", "fairseq")
    return settings


def same_model(a: TransformerConfig, b: TransformerConfig) -> bool:
    """Whether two configs have the same settings in fairseq."""
    return canonical(a) == canonical(b).replace(**{name: getattr(canonical(a), name) for name in not_written(a)})


def read(settings: Settings, arrays: Arrays) -> tuple[TransformerConfig, Arrays]:
    """(config, arrays by Flax name) of settings and a state dict of any version.

    Raises:
        ConversionError: lists the settings that are rejected, or the arrays that do not fit them.
    """
    arrays = _upgrade(arrays)
    if missing := [name for name in (SOURCE, TARGET) if name not in arrays or arrays[name].ndim != 2]:
        raise ConversionError(f"is not a fairseq transformer: has no matrix {missing[0]}")
    config = config_of(settings, (len(arrays[SOURCE]), len(arrays[TARGET])), str(arrays[SOURCE].dtype))
    check_layers(arrays, r"encoder\.layers\.(\d+)\.", "encoder_layers", config.num_encoder_layers)
    check_layers(arrays, r"decoder\.layers\.(\d+)\.", "decoder_layers", config.num_decoder_layers)
    for name in VERSIONS:
        number = float(arrays.pop(name, np.full(1, _VERSION)).ravel()[:1].sum())
        if config.final_norm and number < _VERSION:
            raise ConversionError(f"{name}={number:g}: this version has no final norm, which twinax requires")
    for name in _copies(config):
        copy = arrays.pop(name, None)
        original = SOURCE if config.shared_embeddings else TARGET
        if copy is not None and copy.tobytes() != arrays[original].tobytes():
            raise ConversionError(f"{name}: differs from {original}, with which the settings tie it")
    rules, tables = rules_of(config), position_tables(config)
    specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
    return config, translate([rule.inverse for rule in rules], arrays, target_specs(rules, specs)) | tables


def write(config: TransformerConfig, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The state dict of arrays by Flax name. Raises: ConversionError, lists all arrays that do not fit."""
    tables = position_tables(config)
    used = slice(config.position_offset, config.position_offset + config.max_length)
    for name, table in tables.items():
        exact = POSITION_TABLES[config.positions](*table.shape).astype(table.dtype)
        if name in arrays and not any(np.array_equal(arrays[name][used], t[used]) for t in (table, exact)):
            raise ConversionError(f"{name}: fairseq computes its table and cannot store another")
    specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
    targets = translate(rules_of(config), {n: a for n, a in arrays.items() if n not in tables}, specs)
    for name in _copies(config):
        targets[name] = targets[SOURCE if config.shared_embeddings else TARGET]
    targets |= {name: np.full(1, _VERSION, "float32") for name in VERSIONS}
    fixed = ("encoder", "decoder") if tables else ()
    return targets | {f"{side}.{_FLOAT}": np.zeros(1, config.param_dtype) for side in fixed}


def rules_of(config: TransformerConfig) -> list[Rule]:
    """The rules from Flax names to those of fairseq, without fixed tables."""
    modules = _MODULES | (_LEARNED if config.positions == "learned" else {})
    return rules_by_module(flax_specs(config, trained_only=True), modules)


def _complete(settings: Settings) -> dict[str, Any]:
    """The settings with those of their architecture for missing ones, and references to others resolved."""
    arch = settings.get("arch")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ConversionError(f"arch={arch!r}: is not supported; twinax reads {', '.join(ARCHITECTURES)}")
    stated = {name: value for name, value in settings.items() if not str(value).startswith("${")}
    complete = {**DEFAULTS, **ARCHITECTURES[arch], **stated}
    for name in ("max_source_positions", "max_target_positions"):
        complete[name] = DEFAULTS[name] if complete[name] is None else complete[name]
    for name in ("embed_dim", "ffn_embed_dim"):
        if complete[f"decoder_{name}"] is None:
            complete[f"decoder_{name}"] = complete[f"encoder_{name}"]
    complete["activation_dropout"] = complete["activation_dropout"] or complete["relu_dropout"] or 0.0
    return complete


def _problems(complete: Settings) -> Iterator[str]:
    """One line per setting that twinax does not support."""
    for name in REFUSED:
        if (value := complete.get(name)) not in (None, False, 0, "", [], "None"):
            yield f"{name}={value!r}: twinax does not support this setting"[:200]
    for (name, other), reason in EQUAL.items():
        if name in complete and complete[name] != complete[other]:
            yield f"{name}={complete[name]!r}: must be that of {other}={complete[other]!r}, because {reason}"
    if complete["encoder_normalize_before"] and complete["no_decoder_final_norm"]:
        yield "no_decoder_final_norm=True: a pre-norm model of twinax has a final norm on both sides"
    source, target = complete["max_source_positions"], complete["max_target_positions"]
    if complete["encoder_learned_pos"] and source != target:
        yield f"max_target_positions={target!r}: must be that of max_source_positions={source!r} for learned positions"
    if complete["activation_fn"] not in list(ACTIVATIONS):
        yield f"activation_fn={complete['activation_fn']!r}: must be one of {', '.join(ACTIVATIONS)}"


def _upgrade(arrays: Arrays) -> Arrays:
    """The arrays under the names of the current version, without those that have no content."""
    upgraded: Arrays = {}
    for name, array in arrays.items():
        side, _, rest = name.partition(".")
        if rest in (_FLOAT, "embed_positions.weights") and side in _OLD_NORMS:
            continue
        if FAST_PATH.fullmatch(name):
            continue
        if match := re.fullmatch(r"(.*\.layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)", name):
            norms = dict(enumerate(_OLD_NORMS.get(side, ())))
            upgraded[f"{match[1]}.{norms.get(int(match[2]), 'layer_norms')}.{match[3]}"] = array
        elif match := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):
            parts = np.split(array, 3) if len(array) % 3 == 0 else [array] * 3  # a wrong shape is reported later
            upgraded |= {f"{match[1]}{p}_proj.{match[2]}": part for p, part in zip("qkv", parts, strict=True)}
        else:
            upgraded[OUTPUT if name == "decoder.embed_out" else name] = array
    return upgraded


def _copies(config: TransformerConfig) -> list[str]:
    """The names of arrays that are copies of others because of ties."""
    return [TARGET] * config.shared_embeddings + [OUTPUT] * config.tied_output


def position_tables(config: TransformerConfig) -> Arrays:
    """The fixed position tables, by Flax name; fairseq computes them in float32."""
    if config.positions not in POSITION_TABLES:
        return {}
    check_declared_size(config)
    try:
        table = position_table(config).astype(config.param_dtype)
    except (MemoryError, RuntimeError):
        size = f"max_source_positions={config.max_length}"
        raise ConversionError(f"{size}: a position table of that length does not fit into memory") from None
    return {f"{module}.table": table.copy() for module in POSITIONS}
