"""What the encoder-decoder families of `transformers` have in common; each family is a table in a file of its own.

A family says how its modules are called, which of our config fields it fixes, and how its settings differ from the
others'. The way back is derived: rules have inverses, and a config can be written if what was written reads as it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...configs.errors import ConfigError, ConversionError
from ...configs.schema import TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..port import LEAVES, flax_specs
from ..rules import Rule, Transform, target_specs, translate
from .hugging_face_settings import (
    ALIASES,
    CONSTANTS,
    DEFAULTS,
    KEPT,
    OTHERS,
    SEPARATE_EMBEDDINGS,
    SETTINGS,
    VALUES,
)

# Our module -> theirs. A star is the number of a layer; what follows a module's name is the same in both.
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
    """Names of the embeddings, one tensor where they are tied, and of the output layer."""

    shared: str
    encoder: str
    decoder: str
    output: str = "lm_head.weight"


_BIAS = "final_logits_bias"  # (1, V)
_AS_ROW = Transform(lambda arrays: [arrays[0][None]], lambda arrays: [arrays[0][0]])
# Fields that no such directory holds, or that change rounding alone: they need not come back as they were.
NOT_WRITTEN = ("linear_init", "embedding_init", "score_scaling", "compute_dtype", "dropout_generator")

Arrays = dict[str, np.ndarray]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A family: its names in config.json and in `transformers`, its modules, and where its settings differ."""

    model_type: str
    architecture: str
    modules: Mapping[str, str]
    fixed: Callable[[Settings], dict[str, Any]]  # settings -> the config fields that the family decides
    defaults: Settings  # of settings that config.json leaves out, where they are not DEFAULTS
    prefix: str = "model."  # of every name but those of the output layer
    names: Mapping[str, str] = field(default_factory=lambda: SETTINGS)  # as SETTINGS
    values: Mapping[str, tuple[str, dict[Any, str]]] = field(default_factory=lambda: VALUES)  # as VALUES
    constants: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # as CONSTANTS
    multilingual: bool = False  # decoding starts with the token of the target language, which a user chooses
    separate_embeddings: bool = False  # its settings say whether source and target share a table
    saves_tables: bool = True  # fixed position tables stand in its files
    kept: tuple[str, ...] = ()  # settings that its module does not read, beside KEPT
    ignored: tuple[str, ...] = ()  # arrays in files of old versions that nothing reads
    position_table: Callable[[TransformerConfig], np.ndarray] | None = None  # where it is not the formula's in float64

    @property
    def embeddings(self) -> Embeddings:
        """The names of its embeddings."""
        modules = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        return Embeddings(*(f"{self.prefix}{module}.weight" for module in modules))

    def config(self, settings: Settings, dtype: str) -> TransformerConfig:
        """Our config of their settings, where the weights are of this dtype.

        Raises:
            ConversionError: lists every setting that is not known, or whose value our model does not have.
        """
        given = self._complete(settings)
        if problems := [*self._problems(settings, given, dtype)]:
            raise ConversionError(f"{self.model_type} settings that twinax refuses:\n  " + "\n  ".join(problems))
        values = {ours: given[theirs] for theirs, ours in self.names.items()}
        values |= {ours: known[given[theirs]] for theirs, (ours, known) in self.values.items()}
        values |= {"embedding_dropout": given["dropout"], "residual_dropout": given["dropout"]}
        tied, shared = given["tie_word_embeddings"], given["share_encoder_decoder_embeddings"]
        values |= {"tied_output": tied, "shared_embeddings": tied and shared, "embedding_padding": "frozen"}
        values |= {"src_vocab_size": given["vocab_size"], "tgt_vocab_size": given["decoder_vocab_size"]}
        values |= {"param_dtype": dtype, "compute_dtype": dtype}
        try:
            config = TransformerConfig(**values)  # first, so that `fixed` sees settings of the right types
            return canonical(config.replace(**self.fixed(given)))
        except ConfigError as error:
            ours, equals, rest = str(error).partition("=")
            raise ConversionError(f"{self.model_type} settings: {self._setting_of(ours)}{equals}{rest}") from None

    def settings(self, config: TransformerConfig) -> dict[str, Any]:
        """Their settings of our config.

        Raises:
            ConversionError: lists every field in which no model of this family is like ours.
        """
        settings = {theirs: getattr(config, ours) for theirs, ours in self.names.items()}
        settings["decoder_attention_heads"] = config.decoder_num_heads or config.num_heads
        settings["decoder_ffn_dim"] = config.decoder_d_ff or config.d_ff
        for theirs, (ours, known) in self.values.items():
            settings[theirs] = next(name for name, value in known.items() if value == getattr(config, ours))
        settings |= {"dropout": config.residual_dropout, "vocab_size": config.src_vocab_size}
        settings |= {"tie_word_embeddings": config.tied_output, "dtype": config.param_dtype}
        if self.separate_embeddings:
            settings["share_encoder_decoder_embeddings"] = config.shared_embeddings
            settings["decoder_vocab_size"] = config.tgt_vocab_size
        back, config = self.config(settings, config.param_dtype), canonical(config)
        problems = [
            f"{f.name}={getattr(config, f.name)!r}: here a {self.model_type} model has {getattr(back, f.name)!r}"
            for f in fields(config)
            if f.name not in NOT_WRITTEN and getattr(config, f.name) != getattr(back, f.name)
        ]
        if problems:
            raise ConversionError(f"{self.model_type} has no such model:\n  " + "\n  ".join(problems))
        return {name: value for name, value in settings.items() if value is not None or self._default(name) is not None}

    def read(self, settings: Settings, arrays: Arrays) -> tuple[TransformerConfig, Arrays, Arrays]:
        """(config, our arrays by name, their arrays that no computation reads) of settings and weights.

        Raises:
            ConversionError: lists the settings that are refused, or the arrays that do not fit them.
        """
        arrays = {name: a for name, a in self._with_prefix(arrays).items() if name not in self.ignored}
        config = self.config(settings, _dtype(arrays))
        self._check_layers(arrays, config)
        tables, rules = self.tables(config), self.rules(config)
        _untie(arrays, self._ties(config))
        unused = {name: arrays.pop(name) for name in self.unused(settings) if name in arrays}
        specs = target_specs(rules, flax_specs(config))
        for rule in rules:  # what `transformers` makes anew where a file leaves it out
            (ours,), (theirs,) = rule.source, rule.target
            if theirs not in arrays and ours in tables:
                arrays[theirs] = tables[ours]
            elif theirs not in arrays and theirs == _BIAS:
                arrays[theirs] = np.zeros(specs[theirs].shape, specs[theirs].dtype)
        return config, tables | translate([rule.inverse for rule in rules], arrays, specs), unused

    def write(self, settings: Settings, config: TransformerConfig, arrays: Arrays, unused: Arrays) -> Arrays:
        """Their arrays by name, of ours and of what `read` found unused; `settings` are those that go with them.

        Raises:
            ConversionError: lists all arrays that do not fit the config, or that the family cannot hold.
        """
        rules = self.rules(config)
        theirs = translate(rules, arrays, flax_specs(config))
        named = {rule.source[0]: rule.target[0] for rule in rules}
        for ours, table in self.tables(config).items():
            exact = POSITION_TABLES[config.positions](*table.shape).astype(table.dtype)
            same, as_formula = (_same(_read_rows(arrays[ours], config), _read_rows(t, config)) for t in (table, exact))
            if ours in named and same and not self.saves_tables:
                del theirs[named[ours]]
            elif ours not in named and not (same or as_formula):
                raise ConversionError(f"{ours}: {self.model_type} computes its table and cannot hold another")
        for name in self.unused(settings):  # `transformers` wants it there, whatever it holds
            theirs[name] = unused.get(name, theirs[self.embeddings.encoder])
        return theirs

    def rules(self, config: TransformerConfig) -> list[Rule]:
        """The rule of every array of ours that may stand in a file of this family."""
        names = self.embeddings
        tables = {"src_embedding": names.shared if config.shared_embeddings else names.encoder}
        tables["tgt_embedding"] = names.decoder
        modules = {**self.modules, **{ours: name.removesuffix(".weight") for ours, name in tables.items()}}
        rules = []
        for name in flax_specs(config):
            path, _, leaf = name.rpartition(".")
            number = re.search(r"\.\d+\.", path)
            pattern = re.sub(r"\.\d+\.", ".*.", path)
            module = next((m for m in modules if f"{pattern}.".startswith(f"{m}.")), None)
            if name == "output.bias":
                rules.append(Rule((name,), (_BIAS,), _AS_ROW))
            elif module is not None:
                theirs = modules[module] + pattern.removeprefix(module)
                torch_leaf, transform = LEAVES[leaf]
                torch_leaf = "weight" if leaf == "table" else torch_leaf
                theirs = theirs.replace(".*.", number[0]) if number else theirs
                rules.append(Rule((name,), (f"{theirs}.{torch_leaf}",), transform))
        return rules

    def tables(self, config: TransformerConfig) -> Arrays:
        """The fixed position tables that `transformers` computes for this config, by our name.

        It computes them in float32 whatever the model's dtype; a float64 table would be another one.
        """
        if config.positions not in POSITION_TABLES:
            return {}
        shape = (config.table_length, config.d_model)
        make = self.position_table or (lambda config: POSITION_TABLES[config.positions](*shape).astype(np.float32))
        try:
            return {f"{module}.table": make(config).astype(config.param_dtype) for module in POSITIONS}
        except (MemoryError, RuntimeError):
            size = f"max_position_embeddings={config.max_length}"
            raise ConversionError(f"{size}: a position table of that length does not fit into memory") from None

    def unused(self, settings: Settings) -> tuple[str, ...]:
        """Their arrays that such a model has and no computation reads: the shared table of an untied one."""
        given = self._complete(settings)
        untied = given["share_encoder_decoder_embeddings"] and not given["tie_word_embeddings"]
        return (self.embeddings.shared,) if untied else ()

    def _check_layers(self, arrays: Arrays, config: TransformerConfig) -> None:
        """Raises: ConversionError, before anything is built of so many layers, where the weights have others."""
        for side, wanted in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
            pattern = rf"{re.escape(self.prefix)}{side}\.layers\.(\d+)\."
            found = {int(number[1]) for name in arrays if (number := re.match(pattern, name))}
            if len(found) != wanted:
                raise ConversionError(f"{side}_layers={wanted}: contradicts the weights, which have {len(found)}")

    def _with_prefix(self, arrays: Arrays) -> Arrays:
        """Files of the bare model, without its output layer, leave out the first part of every name."""
        if any(name.startswith(self.prefix) for name in arrays):
            return arrays
        output = (self.embeddings.output, _BIAS)
        return {name if name in output else f"{self.prefix}{name}": a for name, a in arrays.items()}

    def _ties(self, config: TransformerConfig) -> tuple[str, ...]:
        """Their names of what is one tensor, the one that is written first."""
        if config.shared_embeddings:
            return self.embeddings
        return (self.embeddings.decoder, self.embeddings.output) if config.tied_output else ()

    def _setting_of(self, field: str) -> str:
        """The setting that a config field comes from."""
        others = {"embedding_dropout": "dropout", "param_dtype": "dtype"}
        others |= dict.fromkeys(("shared_embeddings", "tied_output"), "tie_word_embeddings")
        others |= {"src_vocab_size": "vocab_size", "tgt_vocab_size": "decoder_vocab_size"}
        return {ours: theirs for theirs, ours in self.names.items()}.get(field, others.get(field, field))

    def _default(self, name: str) -> Any:
        return self.defaults.get(name, DEFAULTS.get(name))

    def _complete(self, settings: Settings) -> dict[str, Any]:
        given = {**DEFAULTS, **self.defaults, **settings}
        given["dtype"] = str(given["dtype"] or given.get("torch_dtype") or "").removeprefix("torch.") or None
        given["decoder_vocab_size"] = given["decoder_vocab_size"] or given["vocab_size"]
        for name in ("eos_token_id", "forced_eos_token_id"):
            if isinstance(given[name], list) and len(given[name]) == 1:
                (given[name],) = given[name]
        return given

    def _problems(self, settings: Settings, given: Settings, dtype: str) -> Iterator[str]:
        constants = {n: allowed for n, allowed in {**CONSTANTS, **self.constants}.items() if n not in self.kept}
        known = {*self.names, *self.values, *OTHERS, *ALIASES, *constants, *KEPT, *self.kept}
        known |= {*SEPARATE_EMBEDDINGS} if self.separate_embeddings else set()
        for name in sorted(set(settings) - known):
            yield f"{name}={settings[name]!r}: twinax does not know what it does in {self.model_type}"
        for name in sorted(set(settings) & set(constants)):
            allowed, why = constants[name]
            if not _equal(settings[name], allowed) and settings[name] is not None:
                yield f"{name}={settings[name]!r}: must be {allowed!r}, since {why}"
        for name in sorted(set(settings) & set(ALIASES)):
            if not _equal(settings[name], given[ALIASES[name]]):
                yield f"{name}={settings[name]!r}: contradicts {ALIASES[name]}={given[ALIASES[name]]!r}"
        for name, (_, values) in self.values.items():
            if not any(_equal(given[name], value) for value in values):
                yield f"{name}={given[name]!r}: known are {', '.join(map(repr, values))}"
        if given["share_encoder_decoder_embeddings"] and given["decoder_vocab_size"] != given["vocab_size"]:
            sizes = f"decoder_vocab_size={given['decoder_vocab_size']!r}, vocab_size={given['vocab_size']!r}"
            yield f"{sizes}: must be equal where share_encoder_decoder_embeddings=True"
        if given["dtype"] not in (None, dtype):
            yield f"dtype={given['dtype']!r}: contradicts the weights, which are {dtype}"


def canonical(config: TransformerConfig) -> TransformerConfig:
    """The same model with None for every size that is what None stands for."""
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
    return config.replace(**changes)


def _equal(one: Any, other: Any) -> bool:
    """Of one type too: 1 is not True, and `transformers` would not take it for that either."""
    return type(one) is type(other) and one == other


def _dtype(arrays: Arrays) -> str:
    return str(max(arrays.values(), key=lambda a: a.size).dtype)


def _untie(arrays: Arrays, names: tuple[str, ...]) -> None:
    """Leaves one of several copies of a tied tensor. Raises: ConversionError where they differ."""
    copies = {name: arrays.pop(name) for name in names if name in arrays}
    for first, name in pairwise(copies):
        if not _same(copies[first], copies[name]):
            raise ConversionError(f"tie_word_embeddings=True: contradicts the weights, {name} is not {first}")
    if copies:
        arrays[names[0]] = next(iter(copies.values()))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit: NaN too, which equals nothing."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return np.array_equal(np.ascontiguousarray(one).view(np.uint8), np.ascontiguousarray(other).view(np.uint8))


def _read_rows(table: np.ndarray, config: TransformerConfig) -> np.ndarray:
    """The rows of a position table that a token can have."""
    return table[config.position_offset :][: config.max_length]
