"""marian-dev's Transformer: options of `special:model.yml` and names of arrays.

Decoding starts from a zero embedding, and EOS is id 0. Marian masks padding without a token for it; twinax appends one
that is never emitted. Its sinusoids and its eps are not those of `transformers`' Marian.
Source: Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation in C++"; `models/transformer.h`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..port import flax_specs
from ..rules import IDENTITY, TRANSPOSE, Rule, Transform, target_specs, translate
from .canonical import canonical
from .foreign import check_layers, check_restored, errors_by_setting
from .hugging_face import POSITIONS

Arrays = dict[str, np.ndarray]
Options = Mapping[str, Any]
_EMBEDDINGS = ("Wemb", "encoder_Wemb", "decoder_Wemb")
_OUT, _BIAS = "decoder_ff_logit_out", "output.bias"
PAD_BIAS = -8192.0  # output bias of padding: its probability is 0, and every dtype holds it exactly
_MAX_LENGTH = 1000  # Marian's default for decoding; a model does not store it
_SINUSOIDAL = "sinusoidal_half_t2t"
DEFAULTS: dict[str, Any] = {
    "type": "transformer",
    "dim-emb": 512,
    "enc-depth": 6,
    "dec-depth": 6,
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": False,
    "output-omit-bias": False,
    "transformer-heads": 8,
    "transformer-dim-ffn": 2048,
    "transformer-decoder-dim-ffn": 0,
    "transformer-ffn-depth": 2,
    "transformer-decoder-ffn-depth": 0,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-train-position-embeddings": False,
    "transformer-dropout": 0.0,
    "transformer-dropout-attention": 0.0,
    "transformer-dropout-ffn": 0.0,
}
OLD_POSITIONS = "transformer-train-positions"  # the former name of transformer-train-position-embeddings
_FIELDS = {  # option -> config field with the same value
    "dim-emb": "d_model",
    "enc-depth": "num_encoder_layers",
    "dec-depth": "num_decoder_layers",
    "transformer-heads": "num_heads",
    "transformer-dim-ffn": "d_ff",
    "transformer-dropout-attention": "attention_dropout",
    "transformer-dropout-ffn": "ffn_dropout",
}
# option -> the supported values
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-ffn-activation": ("swish", "relu"),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-postprocess-emb": ("", "d", "n", "nd", "dn"),
    "transformer-postprocess-top": ("", "n"),
    "transformer-no-projection": (False,),
    "transformer-pool": (False,),
    "transformer-tied-layers": ([], None),
    "right-left": (False,),
    "ulr": (False,),
    "lemma-dim-emb": (0,),
    "lemma-dependency": ("", None),
    "factors-dim-emb": (0,),
    "input-types": ([], None),
}
_REASONS = {"transformer-ffn-activation": {"gelu": ", because the formula of Marian's gelu depends on its version"}}
# (preprocess, postprocess without dropout) -> norm placement
_PLACEMENTS = {("", "an"): "post", ("n", "a"): "pre"}
# Options of other decoders, of initialization and of alignments
_IGNORED = re.compile(r"transformer-(aan-.*|dim-aan|guided-alignment-layer|depth-scaling|rnn-projection)")

_ROW = Transform(lambda arrays: [arrays[0][None]], lambda arrays: [arrays[0][0]])  # (D,) <-> (1, D)
_SIDES = {"encoder": "src", "decoder": "tgt"}
_ATTENTIONS = {"self_attention": "self", "cross_attention": "context"}


def config_of(options: Options, vocab_size: int, rows: int | None, dtype: str) -> TransformerConfig:
    """The config of these options; `vocab_size` includes padding, `rows` is the length of learned positions.

    Raises:
        ConversionError: lists every option that twinax does not support.
    """
    complete = {**DEFAULTS, **options}
    if problems := [*_problems(complete)]:
        raise ConversionError("Marian options that twinax rejects:\n  " + "\n  ".join(problems))
    values = {field: complete[name] for name, field in _FIELDS.items()}
    values |= {"decoder_d_ff": complete["transformer-decoder-dim-ffn"] or None}
    post, emb = complete["transformer-postprocess"], complete["transformer-postprocess-emb"]
    values["norm_placement"] = _PLACEMENTS[complete["transformer-preprocess"], post.removeprefix("d")]
    values["residual_dropout"] = complete["transformer-dropout"] if "d" in post else 0.0
    values["embedding_dropout"] = complete["transformer-dropout"] if "d" in emb else 0.0
    values["embedding_norm"] = {"n": "before_dropout", "nd": "before_dropout", "dn": "after_dropout"}.get(emb, "none")
    values["final_norm"] = complete["transformer-postprocess-top"] == "n"
    values["activation"] = {"swish": "silu"}.get(complete["transformer-ffn-activation"], "relu")
    ties_all = bool(complete["tied-embeddings-all"])
    values["shared_embeddings"] = ties_all or bool(complete["tied-embeddings-src"])
    values["tied_output"] = ties_all or bool(complete["tied-embeddings"])
    values["output_bias"] = "stored" if complete["output-omit-bias"] else "learned"
    has_learned_positions = rows is not None
    values |= {"positions": "learned" if has_learned_positions else _SINUSOIDAL, "max_length": rows or _MAX_LENGTH}
    values["embedding_scale"] = "none" if has_learned_positions else "sqrt_d_model"
    values |= {"norm_eps": 1e-6, "decoder_start": "zero_embedding", "embedding_padding": "frozen"}
    values |= {"pad_id": vocab_size - 1, "decoder_start_id": vocab_size - 1, "bos_id": None, "eos_id": 0}
    values |= {"src_vocab_size": vocab_size, "tgt_vocab_size": vocab_size, "param_dtype": dtype, "compute_dtype": dtype}
    names = {field: name for name, field in _FIELDS.items()} | {"residual_dropout": "transformer-dropout"}
    with errors_by_setting("Marian options", lambda field: names.get(field, field)):
        return canonical(TransformerConfig(**values))


def options_of(config: TransformerConfig) -> dict[str, Any]:
    """The options of a config. Raises: ConversionError, lists every field with a value that no Marian model has."""
    options: dict[str, Any] = {**DEFAULTS, **{name: getattr(config, field) for name, field in _FIELDS.items()}}
    options["transformer-decoder-autoreg"] = "self-attention"
    options["transformer-decoder-dim-ffn"] = config.decoder_d_ff or 0
    options["transformer-ffn-activation"] = "swish" if config.activation == "silu" else "relu"
    pre_norm, dropout = config.norm_placement == "pre", config.residual_dropout
    options |= {"transformer-preprocess": "n", "transformer-postprocess": "da"} if pre_norm else {}
    norms = {"none": "", "before_dropout": "nd", "after_dropout": "dn"}[config.embedding_norm]
    options["transformer-dropout"] = dropout or config.embedding_dropout
    if not dropout:
        options["transformer-postprocess"] = options["transformer-postprocess"].replace("d", "")
    options["transformer-postprocess-emb"] = norms if config.embedding_dropout else norms.replace("d", "")
    if config.embedding_dropout and config.embedding_norm == "none":
        options["transformer-postprocess-emb"] = "d"
    options["transformer-postprocess-top"] = "n" if config.final_norm else ""
    shared, tied = config.shared_embeddings, config.tied_output
    options |= {"tied-embeddings-all": shared and tied, "tied-embeddings-src": shared, "tied-embeddings": tied}
    options["output-omit-bias"] = config.output_bias == "stored"
    options["transformer-train-position-embeddings"] = config.positions == "learned"
    rows = config.max_length if config.positions == "learned" else None
    restored = config_of(options, config.tgt_vocab_size, rows, config.param_dtype)
    check_restored(canonical(config), restored.replace(max_length=config.max_length), "Marian", "Marian")
    return options


def read(options: Options, arrays: Arrays) -> tuple[TransformerConfig, Arrays]:
    """(config, arrays by Flax name) of options and arrays; appends the rows of padding.

    Raises:
        ConversionError: lists the options that are rejected, or the arrays that do not fit them.
    """
    arrays = dict(arrays)
    sizes = {name: len(arrays[name]) for name in _EMBEDDINGS if name in arrays and arrays[name].ndim == 2}
    if len(sizes) != (1 if "Wemb" in sizes else 2):
        raise ConversionError("is not a Marian Transformer: has neither Wemb nor encoder_Wemb and decoder_Wemb")
    dims = options.get("dim-vocabs")
    if isinstance(dims, list) and any(dims) and not {*sizes.values()} <= {*dims}:
        raise ConversionError(f"dim-vocabs={dims}: contradicts {sizes}; factored vocabularies are not supported")
    if _trains_positions(options) and "Wpos" not in arrays:
        raise ConversionError("transformer-train-position-embeddings=True: contradicts the weights, which lack Wpos")
    size, tgt_size = max(sizes.values()) + 1, list(sizes.values())[-1]
    rows = len(arrays["Wpos"]) if _trains_positions(options) else None
    config = config_of(options, size, rows, str(arrays[next(iter(sizes))].dtype))
    check_layers(arrays, r"encoder_l(\d+)_", "enc-depth", config.num_encoder_layers)
    check_layers(arrays, r"decoder_l(\d+)_", "dec-depth", config.num_decoder_layers)
    for name in (*sizes, f"{_OUT}_Wt"):
        arrays |= {name: _padded(arrays[name], 0, size, 0.0)} if name in arrays else {}
    for name, fill in ((f"{_OUT}_W", 0.0), (f"{_OUT}_b", PAD_BIAS)):
        arrays |= {name: _padded(arrays[name], -1, size, fill)} if name in arrays else {}
    tables = _tables(config)
    if config.output_bias == "stored":
        bias = np.where(np.arange(size) < tgt_size, 0, PAD_BIAS).astype(config.param_dtype)
        tables |= {_BIAS: bias}
    rules = rules_of(config, f"{_OUT}_W" if f"{_OUT}_W" in arrays else f"{_OUT}_Wt")
    specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
    return config, translate([rule.inverse for rule in rules], arrays, target_specs(rules, specs)) | tables


def write(config: TransformerConfig, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The arrays by Marian's names, without padding.

    Raises:
        ConversionError: lists all arrays that do not fit, or padding is not what `read` appends.
    """
    tables = _tables(config)
    for name, table in tables.items():
        if name in arrays and not np.array_equal(arrays[name], table):
            raise ConversionError(f"{name}: Marian computes its table and cannot store another")
    skipped = {*tables, *([_BIAS] if config.output_bias == "stored" else [])}
    specs = {name: spec for name, spec in flax_specs(config).items() if name not in skipped}
    rules = rules_of(config, f"{_OUT}_Wt")
    targets = translate(rules, {n: a for n, a in arrays.items() if n not in skipped}, specs)
    bias = arrays[_BIAS]
    size = _without_padding(bias == PAD_BIAS, _BIAS, str(PAD_BIAS))
    if config.output_bias == "stored" and bias[:size].any():
        raise ConversionError(f"{_BIAS}: Marian has no fixed bias, so it must be 0 except for padding")
    for name in targets.keys() & {*_EMBEDDINGS, f"{_OUT}_Wt"}:
        rows = _without_padding((targets[name] == 0).all(1), name, "a row of zeros")
        if name != "encoder_Wemb" and rows > size:
            raise ConversionError(f"{name}: has {rows} rows that are not 0, but {_BIAS} makes ids from {size} padding")
        targets[name] = targets[name][: rows if name == "encoder_Wemb" else size]
    return targets | ({f"{_OUT}_b": targets[f"{_OUT}_b"][:, :size]} if config.output_bias == "learned" else {})


def rules_of(config: TransformerConfig, output: str) -> list[Rule]:
    """The rules from Flax names to those of Marian, without fixed tables; `output`: the name of an untied output."""
    pre = "_pre" if config.norm_placement == "pre" else ""
    rules = [Rule(("src_embedding.embedding",), ("Wemb" if config.shared_embeddings else "encoder_Wemb",))]
    rules += [] if config.shared_embeddings else [Rule(("tgt_embedding.embedding",), ("decoder_Wemb",))]
    for side, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        for i in range(count):
            rules += _layer(f"{side}.layers.{i}", f"{side}_l{i + 1}", pre, side == "decoder")
        rules += _norm(f"{side}.final_norm", f"{side}_top") if config.final_norm else []
        norm = f"{_SIDES[side]}_input.norm"
        rules += _norm(norm, f"{side}_emb", "_pre") if config.embedding_norm != "none" else []
    if config.positions == "learned":
        rules.append(Rule(tuple(f"{module}.table" for module in POSITIONS), ("Wpos",), _ONE_TABLE))
    if not config.tied_output:
        transposed = output.endswith("_Wt")
        rules.append(Rule(("output.proj.kernel",), (output,), TRANSPOSE if transposed else IDENTITY))
    return rules + ([Rule(("output.bias",), (f"{_OUT}_b",), _ROW)] if config.output_bias == "learned" else [])


def _layer(path: str, name: str, pre: str, is_decoder: bool) -> list[Rule]:
    rules = []
    for attention, target in _ATTENTIONS.items() if is_decoder else (("self_attention", "self"),):
        for letter, projection in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
            rules += _linear(f"{path}.{attention}.{projection}", f"{name}_{target}", letter)
        rules += _norm(f"{path}.{attention}_residual.norm", f"{name}_{target}_Wo", pre)
    rules += _linear(f"{path}.feed_forward.inner_proj", f"{name}_ffn", "1")
    rules += _linear(f"{path}.feed_forward.outer_proj", f"{name}_ffn", "2")
    return rules + _norm(f"{path}.feed_forward_residual.norm", f"{name}_ffn_ffn", pre)


def _linear(path: str, name: str, suffix: str) -> list[Rule]:
    return [
        Rule((f"{path}.kernel",), (f"{name}_W{suffix}",)),
        Rule((f"{path}.bias",), (f"{name}_b{suffix}",), _ROW),
    ]


def _norm(path: str, name: str, pre: str = "") -> list[Rule]:
    return [
        Rule((f"{path}.scale",), (f"{name}_ln_scale{pre}",), _ROW),
        Rule((f"{path}.bias",), (f"{name}_ln_bias{pre}",), _ROW),
    ]


def _share(tables: Any) -> list[np.ndarray]:
    if tables[0].tobytes() != tables[1].tobytes():
        raise ConversionError("positions of source and target differ, but Marian has one table (Wpos)")
    return [tables[0]]


_ONE_TABLE = Transform(_share, lambda arrays: [arrays[0], arrays[0].copy()])


def _problems(complete: Options) -> Iterator[str]:
    """One line per option that twinax does not support."""
    for name, allowed in _ALLOWED.items():
        if name in complete and not any(type(complete[name]) is type(v) and complete[name] == v for v in allowed):
            values = ", ".join(repr(value) for value in allowed if value is not None)
            reason = _REASONS.get(name, {}).get(str(complete[name]), "")
            cell = f" (dec-cell={complete.get('dec-cell')!r})" if name == "transformer-decoder-autoreg" else ""
            yield f"{name}={complete[name]!r}{cell}: must be {values}{reason}"[:200]
    pre, post = str(complete["transformer-preprocess"]), str(complete["transformer-postprocess"])
    if (pre, post.removeprefix("d")) not in _PLACEMENTS:
        allowed = "'' and 'dan' (post-norm), or 'n' and 'da' (pre-norm)"
        yield f"transformer-preprocess={pre!r}, transformer-postprocess={post!r}: must be {allowed}"
    for name, value in complete.items():
        unknown = name not in {*DEFAULTS, *_ALLOWED} and not _IGNORED.fullmatch(name)
        if name.startswith("transformer-") and unknown and name != OLD_POSITIONS and value:
            yield f"{name}={value!r}: twinax does not know this option"[:200]
    if isinstance(width := complete["dim-emb"], int) and width % 2:
        yield f"dim-emb={width}: must be even for Marian's positions"


def _trains_positions(options: Options) -> bool:
    return bool(options.get("transformer-train-position-embeddings") or options.get(OLD_POSITIONS))


def _tables(config: TransformerConfig) -> Arrays:
    """The fixed position tables, by Flax name."""
    if config.positions not in POSITION_TABLES:
        return {}
    table = POSITION_TABLES[config.positions](config.table_length, config.d_model).astype(config.param_dtype)
    return {f"{module}.table": table.copy() for module in POSITIONS}


def _padded(array: np.ndarray, axis: int, size: int, fill: float) -> np.ndarray:
    """The array, extended to `size` along an axis; arrays of a wrong shape are reported later."""
    if array.ndim != 2 or array.shape[axis] > size:
        return array
    widths = [(0, 0), (0, 0)]
    widths[axis] = (0, size - array.shape[axis])
    return np.pad(array, widths, constant_values=fill)


def _without_padding(is_padding: np.ndarray, name: str, requirement: str) -> int:
    """The number of ids before those of padding at the end. Raises: ConversionError if the last id is not padding."""
    if not is_padding[-1]:
        raise ConversionError(f"{name}: must have {requirement} at the last id, padding, which Marian does not store")
    return int(np.append(np.flatnonzero(~is_padding), -1).max()) + 1
