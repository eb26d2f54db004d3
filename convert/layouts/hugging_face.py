"""The common code of the encoder-decoder families of `transformers`; each family is a table in its own file.

A family lists the names of its modules, the config fields that it fixes, and its differences in settings. Writing is
derived from reading: rules have inverses, and a config can be written if reading the result gives it back.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import numpy as np

from ...backend.errors import ConversionError
from ...configs.schema import DType, TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..arrays.frameworks import cast
from ..arrays.lazy import LazyArrays, lazy, same_bits, specs_of
from ..io.untrusted import check_declared_size
from ..port import flax_specs
from ..rules import Rule, Transform, target_specs, translate_lazily
from .canonical import canonical, up_to_rounding
from .foreign import check_layers, check_restored, errors_by_setting, rules_by_module
from .hugging_face_settings import BART_LIKE, CONSTANTS, DERIVED, IGNORED, SEPARATE_EMBEDDINGS, Tables

# Flax module -> module of `transformers`. A star stands for a layer number; the names of parameters are the same.
LAYERS = {
    "encoder.layers.*.self_attention": "model.encoder.layers.*.self_attn",
    "encoder.layers.*.self_attention_residual.norm": "model.encoder.layers.*.self_attn_layer_norm",
    "encoder.layers.*.feed_forward.inner_proj": "model.encoder.layers.*.fc1",
    "encoder.layers.*.feed_forward.outer_proj": "model.encoder.layers.*.fc2",
    "encoder.layers.*.feed_forward_residual.norm": "model.encoder.layers.*.final_layer_norm",
    "decoder.layers.*.self_attention": "model.decoder.layers.*.self_attn",
    "decoder.layers.*.self_attention_residual.norm": "model.decoder.layers.*.self_attn_layer_norm",
    "decoder.layers.*.cross_attention": "model.decoder.layers.*.encoder_attn",
    "decoder.layers.*.cross_attention_residual.norm": "model.decoder.layers.*.encoder_attn_layer_norm",
    "decoder.layers.*.feed_forward.inner_proj": "model.decoder.layers.*.fc1",
    "decoder.layers.*.feed_forward.outer_proj": "model.decoder.layers.*.fc2",
    "decoder.layers.*.feed_forward_residual.norm": "model.decoder.layers.*.final_layer_norm",
    "output.proj": "lm_head",
}
POSITIONS = {
    "src_input.positions": "model.encoder.embed_positions",
    "tgt_input.positions": "model.decoder.embed_positions",
}
EMBEDDING_NORMS = {
    "src_input.norm": "model.encoder.layernorm_embedding",
    "tgt_input.norm": "model.decoder.layernorm_embedding",
}
FINAL_NORMS = {"encoder.final_norm": "model.encoder.layer_norm", "decoder.final_norm": "model.decoder.layer_norm"}


class Embeddings(NamedTuple):
    """Names of the embedding tables, which tying makes one tensor, and of the output layer."""

    shared: str
    encoder: str
    decoder: str
    output: str = "lm_head.weight"


# heads of other classes of `transformers`
_HEADS = re.compile(r"(?<![^.])(classification_head|classifier|qa_outputs|score)\.")
_BIAS = "final_logits_bias"  # (1, V)
_AS_ROW = Transform(lambda arrays: [arrays[0][None]], lambda arrays: [arrays[0][0]])

Named = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A family: its names in config.json and in `transformers`, its modules, and its differences in settings."""

    model_type: str
    architecture: str
    modules: Mapping[str, str]
    fixed: Callable[[Settings], dict[str, Any]]  # settings -> config fields that are the same for the whole family
    defaults: Settings  # values of settings missing from config.json, where they differ from those of the tables
    prefix: str = "model."  # prefix of every name except those of the output layer
    tables: Tables = BART_LIKE
    gated_modules: Mapping[str, str] = field(default_factory=dict)  # further modules of gated feed-forward networks
    constants: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # as CONSTANTS
    multilingual: bool = False  # decoding starts with the token of the target language, which the user chooses
    separate_embeddings: bool = False  # a setting controls whether source and target share a table
    saves_tables: bool = True  # its files store fixed position tables
    ignored_settings: tuple[str, ...] = ()  # settings that its module does not read, in addition to IGNORED
    ignored_arrays: tuple[str, ...] = ()  # arrays in files of old versions that are not read
    kept_in_float32: str | None = None  # pattern of arrays that `transformers` keeps in float32 in float16 models
    position_table: Callable[[TransformerConfig], np.ndarray] | None = None  # None: the formula's, in float64
    # (settings, whether the weights tie the output) -> settings, in families whose weights decide about tying
    resolve: Callable[[Settings, bool], Settings] = lambda settings, tied: settings

    @property
    def embeddings(self) -> Embeddings:
        """The names of the family's embeddings."""
        modules = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        return Embeddings(*(f"{self.prefix}{module}.weight" for module in modules))

    def config(self, settings: Settings, dtype: str) -> TransformerConfig:
        """The config of these settings, for weights of this dtype.

        Raises:
            ConversionError: lists every setting that is unknown, or whose value twinax does not support.
        """
        complete = self._complete(settings)
        if problems := [*self._problems(settings, complete, dtype)]:
            raise ConversionError(f"{self.model_type} settings that twinax rejects:\n  " + "\n  ".join(problems))
        values = {field: complete[name] for name, field in self.tables.names.items()}
        for name, table in self.tables.values.items():
            values |= table[complete[name]]
        dropout, sites = self.tables.dropout
        values |= dict.fromkeys(sites, complete[dropout])
        tied, shared = complete["tie_word_embeddings"], complete["share_encoder_decoder_embeddings"]
        values |= {"tied_output": tied, "shared_embeddings": tied and shared, "embedding_padding": "frozen"}
        values |= {"src_vocab_size": complete["vocab_size"], "tgt_vocab_size": complete["decoder_vocab_size"]}
        values |= {"param_dtype": dtype, "compute_dtype": dtype}
        with errors_by_setting(f"{self.model_type} settings", self._setting_of):
            config = TransformerConfig(**values)  # first, so that `fixed` gets settings of valid types
            return canonical(config.replace(**self.fixed(complete)))

    def settings(self, config: TransformerConfig) -> dict[str, Any]:
        """The family's settings of a config. A learned output bias becomes the family's fixed one, with its values.

        Raises:
            ConversionError: lists every field with a value that no model of this family has.
        """
        sizes = {
            "decoder_num_heads": config.decoder_num_heads or config.num_heads,
            "decoder_d_ff": config.decoder_d_ff or config.d_ff,
            "head_dim": config.query_key_width(config.num_heads),
        }
        values = {f.name: sizes.get(f.name, getattr(config, f.name)) for f in fields(config)}
        settings = {name: values[field] for name, field in self.tables.names.items()}
        for name, table in self.tables.values.items():
            settings[name] = max(table, key=lambda value: len(table[value].items() & values.items()))
        settings |= {self.tables.dropout[0]: config.residual_dropout, "vocab_size": config.src_vocab_size}
        settings |= {"tie_word_embeddings": config.tied_output, "dtype": config.param_dtype}
        if self.separate_embeddings:
            settings["share_encoder_decoder_embeddings"] = config.shared_embeddings
            settings["decoder_vocab_size"] = config.tgt_vocab_size
        restored = self.config(settings, config.param_dtype)
        stored = (config.output_bias, restored.output_bias) == ("learned", "stored")
        stored_config = config.replace(output_bias="stored") if stored else config
        check_restored(up_to_rounding(stored_config), restored, self.model_type, self.model_type)
        return {name: value for name, value in settings.items() if value is not None or self._default(name) is not None}

    def read(self, settings: Settings, arrays: Named) -> tuple[TransformerConfig, LazyArrays, Named]:
        """(config, arrays by Flax name, unused arrays) of settings and weights.

        Raises:
            ConversionError: lists the settings that are rejected, or the arrays that do not fit them.
        """
        full_name = self.with_prefix(arrays)
        arrays = {full_name[name]: a for name, a in arrays.items() if full_name[name] not in self.ignored_arrays}
        settings, dtype, mixed = self._resolve_dtype(settings, arrays)
        config = self.config(settings, dtype)
        for side in ("encoder", "decoder"):
            target = next(target for module, target in self.modules.items() if module.startswith(f"{side}.layers.*."))
            pattern, field = re.escape(target.partition("*")[0]) + r"(\d+)\.", f"num_{side}_layers"
            check_layers(arrays, pattern, self._setting_of(field), getattr(config, field))
        tables, rules = self.position_tables(config), self.rules(config)
        _untie(arrays, self._ties(config))
        unused: Mapping[str, np.ndarray]
        unused = {name: arrays.pop(name) for name in self.unused(settings, config) if name in arrays}
        specs = target_specs(rules, flax_specs(config))
        for rule in rules:  # `transformers` recreates these arrays if a file lacks them
            (name,), (target,) = rule.source, rule.target
            if target not in arrays and name in tables:
                arrays[target] = tables[name]
            elif target not in arrays and target == _BIAS:
                arrays[target] = np.zeros(specs[target].shape, specs[target].dtype)
        weights, unused = (cast(part, dtype) if mixed else part for part in (arrays, unused))
        return config, lazy(tables) | translate_lazily([rule.inverse for rule in rules], weights, specs), unused

    def in_dtype(self, settings: Settings, arrays: Named, dtype: str | None) -> tuple[Settings, Named]:
        """(settings, arrays) of one dtype, as `from_pretrained` loads them; unchanged if they are of one.

        It is `dtype`, else that of the settings, else that of the first array. In float16, arrays that are kept in
        float32 become so.
        """
        dtypes = {name: str(array.dtype) for name, array in arrays.items()}
        floats = {name: own for name, own in dtypes.items() if own in get_args(DType)}
        stated: Any = self._complete(settings)["dtype"] or next(iter(floats.values()), None)
        full_name = self.with_prefix(arrays)
        kept = {name for name in floats if self.is_kept(full_name[name])}
        if stated not in get_args(DType) or all(own == stated for name, own in floats.items() if name not in kept):
            return settings, arrays
        dtype = str(dtype or stated)
        narrow, wide = [
            [n for n in floats if (dtype == "float16" and n in kept) is is_kept] for is_kept in (False, True)
        ]
        converted = cast(lazy(arrays).select(narrow), dtype) | cast(lazy(arrays).select(wide), "float32")
        rest = {name: array for name, array in arrays.items() if name not in floats}
        return {**settings, "dtype": dtype, "torch_dtype": None}, {**rest, **converted}

    def _resolve_dtype(self, settings: Settings, arrays: Named) -> tuple[Settings, str, bool]:
        """(resolved settings, dtype of the model, whether the dtypes are mixed and all become float32).

        Arrays that are kept in float32 make a float16 model a float32 one, which changes no value.
        """
        settings, dtype = self.resolve(settings, self._are_tied(arrays)), _dtype(arrays)
        mixed = dtype == "float16" and any(a.dtype == np.float32 for name, a in arrays.items() if self.is_kept(name))
        if mixed:
            settings, dtype = {n: v for n, v in settings.items() if n not in ("dtype", "torch_dtype")}, "float32"
        return settings, dtype, mixed

    def is_kept(self, name: str) -> bool:
        """Whether `transformers` keeps this array of the family in float32 in a float16 model."""
        return re.search(self.kept_in_float32 or r"$^", name) is not None

    def kept_arrays(self, config: TransformerConfig) -> tuple[str, ...]:
        """The Flax names of these arrays."""
        return tuple(rule.source[0] for rule in self.rules(config) if self.is_kept(rule.target[0]))

    def write(self, settings: Settings, config: TransformerConfig, arrays: Named, unused: Named) -> LazyArrays:
        """The family's arrays by name, from arrays by Flax name and the unused arrays of `read`.

        `settings` are the settings written beside them. In float16, arrays that are kept in float32 may be float32.

        Raises:
            ConversionError: lists all arrays that do not fit the config, or that the family cannot store.
        """
        rules, actual_specs = self.rules(config), specs_of(arrays)
        target_of = {rule.source[0]: rule.target[0] for rule in rules}
        specs = {
            name: actual_specs[name]
            if config.param_dtype == "float16" and self.is_kept(target_of.get(name, ""))
            else spec
            for name, spec in flax_specs(config).items()
        }
        targets = translate_lazily(rules, arrays, specs)
        omitted = set()
        for name, table in self.position_tables(config).items():
            exact = POSITION_TABLES[config.positions](*table.shape).astype(table.dtype)
            rows = _used_rows(arrays[name], config)
            same, as_formula = (same_bits(rows, _used_rows(t, config)) for t in (table, exact))
            if name in target_of and same and not self.saves_tables:
                omitted.add(target_of[name])
            elif name not in target_of and not (same or as_formula):
                raise ConversionError(f"{name}: {self.model_type} computes its table and cannot store another")
        others = {  # `transformers` requires them with any values
            name: unused[name] if name in unused else targets[self.embeddings.encoder]
            for name in self.unused(settings, config)
        }
        return targets.select([name for name in targets if name not in omitted]) | others

    def rules(self, config: TransformerConfig) -> list[Rule]:
        """The rules of all arrays that a file of this family may store."""
        names = self.embeddings
        tables = {"src_embedding": names.shared if config.shared_embeddings else names.encoder}
        tables["tgt_embedding"] = names.decoder
        modules = {**self.modules, **(self.gated_modules if config.ffn_gate else {})}
        modules |= {module: name.removesuffix(".weight") for module, name in tables.items()}
        output_bias = [Rule(("output.bias",), (_BIAS,), _AS_ROW)] if config.output_bias != "none" else []
        return rules_by_module(flax_specs(config), modules) + output_bias

    def position_tables(self, config: TransformerConfig) -> Arrays:
        """The fixed position tables that `transformers` computes for this config, by Flax name.

        It computes them in float32 for every dtype of the model; a float64 table would differ.
        """
        if config.positions not in POSITION_TABLES:
            return {}
        check_declared_size(config)
        shape = (config.table_length, config.d_model)
        compute = self.position_table or (lambda config: POSITION_TABLES[config.positions](*shape).astype(np.float32))
        try:
            return {f"{module}.table": compute(config).astype(config.param_dtype) for module in POSITIONS}
        except (MemoryError, RuntimeError):
            size = f"max_position_embeddings={config.max_length}"
            raise ConversionError(f"{size}: a position table of that length does not fit into memory") from None

    def unused(self, settings: Settings, config: TransformerConfig) -> tuple[str, ...]:
        """The names of arrays that such a model has but does not use: the shared table of an untied BART."""
        shares = self._complete(settings)["share_encoder_decoder_embeddings"]
        return (self.embeddings.shared,) if shares and not config.shared_embeddings else ()

    def with_prefix(self, names: Iterable[str]) -> dict[str, str]:
        """Names -> names with the family's prefix, which files of the bare model, without output layer, lack."""
        names = [*names]
        if any(name.startswith(self.prefix) for name in names):
            return dict(zip(names, names, strict=True))
        output = (self.embeddings.output, _BIAS)
        return {name: name if name in output else f"{self.prefix}{name}" for name in names}

    @property
    def table_names(self) -> tuple[str, ...]:
        """The names of the embedding tables, of which weights have at least one, with and without the prefix."""
        tables = self.embeddings[:3]
        return (*tables, *(name.removeprefix(self.prefix) for name in tables))

    def check_class(self, settings: Settings, names: Iterable[str]) -> None:
        """Check that the weights are not those of a class with another head, or without encoder or decoder.

        Raises:
            ConversionError: they are.
        """
        names = [*names]
        head = next((name for name in names if _HEADS.search(name)), None)
        missing = [s for s in ("encoder", "decoder") if not any(re.search(rf"(?<![^.]){s}\.", n) for n in names)]
        if head or missing:
            classes = settings.get("architectures")
            named = f"architectures={classes!r}" if classes and classes != [self.architecture] else "architectures"
            reason = f"have the head of another class, {head}" if head else f"have no {' and no '.join(missing)}"
            raise ConversionError(f"{named}: twinax reads {self.architecture}, and the weights {reason}")

    def with_copies(self, settings: Settings, arrays: Arrays) -> tuple[Arrays, tuple[str, ...]]:
        """(the arrays with every copy of the tied tensor and the family's prefix, the names of the copies)."""
        full_name = self.with_prefix(arrays)
        arrays = {full_name[name]: a for name, a in arrays.items()}
        resolved, dtype, _ = self._resolve_dtype(settings, arrays)
        ties = self._ties(self.config(resolved, dtype))
        tensor = next((arrays[name] for name in ties if name in arrays), None)
        return arrays | (dict.fromkeys(ties, tensor) if tensor is not None else {}), ties

    def untied(self, settings: Settings) -> dict[str, Any]:
        """The settings with an untied output layer, unless the weights decide about tying."""
        decide = self.resolve(settings, True) != self.resolve(settings, False)
        return {**settings, **({} if decide else {"tie_word_embeddings": False})}

    def _ties(self, config: TransformerConfig) -> tuple[str, ...]:
        """The names of the family's tied tensor; the first one is written."""
        *names, output = self.embeddings
        inputs = names if config.shared_embeddings else names[2:]
        return (*inputs, output) if config.tied_output else tuple(inputs) if config.shared_embeddings else ()

    def _are_tied(self, arrays: Named) -> bool:
        """Whether the output layer is missing or equals an embedding table, in which case `transformers` ties them."""
        *names, output = self.embeddings
        tables = [arrays[name] for name in names if name in arrays]
        return output not in arrays or any(same_bits(table, arrays[output]) for table in tables)

    def _setting_of(self, field: str) -> str:
        """The setting that determines a config field."""
        dropout, sites = self.tables.dropout
        derived = {**dict.fromkeys(sites, dropout), "param_dtype": "dtype"}
        derived |= dict.fromkeys(("shared_embeddings", "tied_output"), "tie_word_embeddings")
        derived |= {"src_vocab_size": "vocab_size", "tgt_vocab_size": "decoder_vocab_size"}
        return {value: name for name, value in self.tables.names.items()}.get(field, derived.get(field, field))

    def _default(self, name: str) -> Any:
        return self.defaults.get(name, self.tables.defaults.get(name))

    def _complete(self, settings: Settings) -> dict[str, Any]:
        """The settings with defaults for missing ones, in canonical form."""
        complete = {**self.tables.defaults, **self.defaults, **settings}
        complete["dtype"] = str(complete["dtype"] or complete.get("torch_dtype") or "").removeprefix("torch.") or None
        for name, other in self.tables.fallbacks.items():
            complete[name] = complete[other] if complete[name] is None else complete[name]
        for name in ("eos_token_id", "forced_eos_token_id"):
            if isinstance(complete[name], list) and len(complete[name]) == 1:
                (complete[name],) = complete[name]
        return complete

    def _problems(self, settings: Settings, complete: Settings, dtype: str) -> Iterator[str]:
        """One line per setting of a file that is unknown or unsupported."""
        constants = {n: v for n, v in {**CONSTANTS, **self.constants}.items() if n not in self.ignored_settings}
        repeated, values = self.tables.repeated, self.tables.values
        names = {*self.tables.names, *values, self.tables.dropout[0], *DERIVED, *repeated, *constants}
        names |= {*IGNORED, *self.ignored_settings}
        names |= {*SEPARATE_EMBEDDINGS} if self.separate_embeddings else set()
        for name in sorted(set(settings) - names):
            yield f"{name}={settings[name]!r}: twinax does not know this setting of {self.model_type}"
        for name in sorted(set(settings) & set(constants)):
            allowed, reason = constants[name]
            if not _equal(settings[name], allowed) and settings[name] is not None:
                yield f"{name}={settings[name]!r}: must be {allowed!r}, because {reason}"
        for name, table in values.items():
            if not any(_equal(complete[name], value) for value in table):
                yield f"{name}={complete[name]!r}: must be one of {', '.join(map(repr, table))}"
        for name in sorted(set(settings) & set(repeated)):
            other, function = repeated[name]
            if not _equal(settings[name], function(complete[other])):
                yield f"{name}={settings[name]!r}: contradicts {other}={complete[other]!r}"
        if complete["share_encoder_decoder_embeddings"] and complete["decoder_vocab_size"] != complete["vocab_size"]:
            sizes = f"decoder_vocab_size={complete['decoder_vocab_size']!r}, vocab_size={complete['vocab_size']!r}"
            yield f"{sizes}: must be equal if share_encoder_decoder_embeddings=True"
        if complete["dtype"] not in (None, dtype):
            yield f"dtype={complete['dtype']!r}: contradicts the weights, which are {dtype}"


def _equal(a: Any, b: Any) -> bool:
    """Whether value and type are equal: 1 is not True, as in `transformers`."""
    return type(a) is type(b) and a == b


def _dtype(arrays: Named) -> str:
    return str(max(arrays.values(), key=lambda a: a.size).dtype)


def _untie(arrays: Arrays, names: tuple[str, ...]) -> None:
    """Remove all but one copy of a tied tensor. Raises: ConversionError if the copies differ."""
    copies = {name: arrays.pop(name) for name in names if name in arrays}
    for first, name in pairwise(copies):
        if not same_bits(copies[first], copies[name]):
            raise ConversionError(f"tie_word_embeddings=True: contradicts the weights, {name} differs from {first}")
    if copies:
        arrays[names[0]] = next(iter(copies.values()))


def _used_rows(table: np.ndarray, config: TransformerConfig) -> np.ndarray:
    """The rows of a position table that a token can have."""
    return table[config.position_offset :][: config.max_length]
