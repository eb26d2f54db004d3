"""The common code of the five published systems' layouts; each system has its rules in its own file.

Their files are bare state dicts. Sizes are inferred from the arrays. Settings that the arrays do not determine, such as
the number of heads, are assumed to be those of the published config.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..port import flax_specs
from ..rules import IDENTITY, TRANSPOSE, Rule, Transform, target_specs, translate
from .canonical import canonical

Named = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
# Config fields that every system's settings determine, or that none of them uses.
_FREE = (
    *("src_vocab_size", "tgt_vocab_size", "d_model", "num_heads", "head_dim", "v_head_dim", "d_ff"),
    *("num_encoder_layers", "num_decoder_layers", "max_length", "position_table_length"),
    *("param_dtype", "compute_dtype"),
    *("pad_id", "bos_id", "eos_id", "decoder_start_id", "forced_bos_id", "forced_eos_id"),
)

IDS = ("pad_id", "bos_id", "eos_id")
# Config fields that only affect training.
_TRAINING_ONLY = (
    *(
        "embedding_dropout",
        "attention_dropout",
        "ffn_dropout",
        "residual_dropout",
        "final_dropout",
        "dropout_generator",
    ),
    *("linear_init", "embedding_init"),
)


@dataclass(frozen=True)
class PublishedLayout:
    """The layout of a published system."""

    rules: Callable[[TransformerConfig], list[Rule]]  # rules from Flax names to the system's names
    # (arrays, as published or repaired, number of heads) -> config fields that the arrays determine
    fields: Callable[[Named, bool, int], dict[str, Any]]
    mark: str  # regular expression of a name that no other layout has
    parts: tuple[str, ...] = ()  # prefixes of names that a file may rename
    unused: str = "(?!)"  # regular expression of the names of unused arrays
    prefixes: Callable[[Collection[str]], dict[str, str]] = lambda names: {}  # names in a file -> prefixes by part
    tables: Callable[[TransformerConfig], Arrays] = lambda config: {}  # arrays by Flax name that a file lacks
    free: tuple[str, ...] = ()  # further config fields that the system's settings determine
    # reason why the system has no such model, beyond single fields
    refusal: Callable[[TransformerConfig, bool], str | None] = lambda config, as_published: None
    # (settings stored beside the state dict, arrays) -> config fields that the settings state
    stated_fields: Callable[[Any, Named], dict[str, Any]] = lambda settings, arrays: {}
    # config fields that the arrays of such a model do not determine
    undetermined: Callable[[TransformerConfig], tuple[str, ...]] = lambda config: ("num_heads", *IDS)

    def config(self, name: str, arrays: Named, as_published: bool, overrides: Mapping[str, Any]) -> TransformerConfig:
        """The config of a state dict, with `overrides` for config fields.

        Raises:
            ConfigError: a field is invalid.
            ConversionError: the state dict lacks an array that determines a size.
        """
        if "param_dtype" in overrides:
            raise ConversionError("param_dtype: is determined by the tensors; omit it")
        heads = overrides.get("num_heads", TransformerConfig.published(name, as_published=as_published).num_heads)
        if type(heads) is not int or heads < 1:
            raise ConversionError(f"num_heads={heads!r}: must be a whole number of at least 1")
        try:
            fields = self.fields(arrays, as_published, heads)
        except ConversionError:
            raise
        except (KeyError, IndexError, ValueError) as error:
            raise ConversionError(
                f"is not a complete state dict of {name}: {error} is missing or has a wrong shape"
            ) from None
        dtypes: dict[str, Any] = {"param_dtype": str(next(iter(arrays.values())).dtype)}
        if dtypes["param_dtype"] == "float64":  # the published module computes in float64 too
            dtypes["compute_dtype"] = "float64"
        if "bos_id" in overrides:
            dtypes["decoder_start_id"] = overrides["bos_id"]
        config = TransformerConfig.published(name, as_published=as_published, **{**dtypes, **fields, **overrides})
        if refusal := self.refusal(config, as_published):
            raise ConversionError(refusal)
        return config

    def assumptions(
        self,
        name: str,
        arrays: Named,
        config: TransformerConfig,
        as_published: bool | None,
        overrides: Mapping[str, Any],
    ) -> tuple[str, ...]:
        """Settings that neither the arrays nor `overrides` determine, such as ("as published", "num_heads=8").

        `config` is the assumed config; `as_published` is None if the variant is assumed too.
        """
        settings = [f"{f}={getattr(config, f)!r}" for f in self.undetermined(config) if f not in overrides]
        if as_published is None and self._could_be_repaired(name, arrays, config, overrides):
            settings.insert(0, "as published")
        return tuple(settings)

    def _could_be_repaired(
        self, name: str, arrays: Named, config: TransformerConfig, overrides: Mapping[str, Any]
    ) -> bool:
        """Whether the arrays also fit the repaired model, and it is another function than `config`."""
        try:
            repaired = self.config(name, arrays, False, overrides)
        except ValueError:  # there is no repaired model with these overrides
            return False
        names = {target for rule in self.rules(repaired) for target in rule.target}
        training_fields = {field: getattr(config, field) for field in _TRAINING_ONLY}
        return names == set(self.split(arrays)[0]) and canonical(repaired.replace(**training_fields)) != canonical(
            config
        )

    def read(self, arrays: Named, config: TransformerConfig) -> tuple[Arrays, Arrays]:
        """(arrays by Flax name, unused arrays). Raises: ConversionError, lists all arrays that do not fit."""
        arrays, unused = self.split(arrays)
        tables, rules = self.tables(config), self.rules(config)
        specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
        return translate([rule.inverse for rule in rules], arrays, target_specs(rules, specs)) | tables, unused

    def write(self, name: str, arrays: Named, config: TransformerConfig) -> Arrays:
        """The system's arrays by name. Raises: ConversionError if it has no such model, or arrays do not fit."""
        self._check(name, config)
        tables = self.tables(config)
        for table, reference in tables.items():
            array = arrays.get(table, reference)  # if it is missing, `translate` raises
            if not any(np.array_equal(array, allowed) for allowed in (reference, _formula(config))):
                raise ConversionError(f"{table}: {name} computes its table and cannot store another")
        specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
        return translate(self.rules(config), {n: a for n, a in arrays.items() if n not in tables}, specs)

    def _check(self, name: str, config: TransformerConfig) -> None:
        """Raises: ConversionError, lists the fields that differ from the nearest variant of the system."""
        problems = min((self._problems(name, config, as_published) for as_published in (True, False)), key=len)
        if problems:
            raise ConversionError(f"{name} has no such model:\n  " + "\n  ".join(problems))

    def variant(self, name: str, config: TransformerConfig) -> bool | None:
        """True if the config is the system's as published, False if it is repaired, None if it is neither."""
        variants = (v for v in (True, False) if not self._problems(name, config, v))
        return next(variants, None)

    def _problems(self, name: str, config: TransformerConfig, as_published: bool) -> list[str]:
        """One line per field in which a variant of the system differs from the config."""
        free = {field: getattr(config, field) for field in (*_FREE, *_TRAINING_ONLY, *self.free)}
        variant = canonical(TransformerConfig.published(name, as_published=as_published, **free))
        config = canonical(config)
        refusal = self.refusal(config, as_published)
        names = (f.name for f in fields(config) if getattr(config, f.name) != getattr(variant, f.name))
        problems = [f"{name}={getattr(config, name)!r}: must be {getattr(variant, name)!r}" for name in names]
        return problems if refusal is None else [*problems, refusal]

    def split(self, arrays: Named) -> tuple[Arrays, Arrays]:
        """(used arrays, unused arrays)."""
        unused = {name: a for name, a in arrays.items() if re.fullmatch(self.unused, name)}
        return {name: a for name, a in arrays.items() if name not in unused}, unused


def linear(source: str, target: str, bias: bool = True) -> list[Rule]:
    """The rules of a torch.nn.Linear; `source` is its Flax path, `target` its path in the system."""
    rules = [Rule((f"{source}.kernel",), (f"{target}.weight",), TRANSPOSE)]
    return [*rules, Rule((f"{source}.bias",), (f"{target}.bias",))] if bias else rules


def norm(source: str, target: str, gain: str = "weight", shift: str = "bias") -> list[Rule]:
    """The rules of a norm with gain and shift."""
    return [Rule((f"{source}.scale",), (f"{target}.{gain}",)), Rule((f"{source}.bias",), (f"{target}.{shift}",))]


def embedding(source: str, *targets: str) -> Rule:
    """The rule of an embedding table, which is tied if it has several target names."""
    return Rule((f"{source}.embedding",), targets, IDENTITY if len(targets) == 1 else _copies(1, len(targets)))


def attention(source: str, targets: Mapping[str, str], bias: bool) -> list[Rule]:
    """The rules of an attention; `targets` are the paths of q_proj, k_proj, v_proj and out_proj."""
    return [rule for name, target in targets.items() for rule in linear(f"{source}.{name}", target, bias)]


@dataclass(frozen=True)
class LayerNames:
    """A system's names of the parts of a layer; in `norms`, # is a number, `first` for the first attention."""

    projections: tuple[str, str, str, str]  # q_proj, k_proj, v_proj, out_proj
    bias: bool  # whether the projections have biases
    inner: str
    outer: str
    norms: str
    first: int = 1
    gain: str = "weight"
    shift: str = "bias"

    def rules(self, source: str, target: str, attentions: Mapping[str, str]) -> list[Rule]:
        """The rules of a layer; `attentions` maps Flax names of attentions to the system's names."""
        rules = []
        norms = [f"{target}.{self.norms.replace('#', str(self.first + i))}" for i in range(len(attentions) + 1)]
        for (name, target_name), norm_path in zip(attentions.items(), norms, strict=False):
            pairs = zip(("q_proj", "k_proj", "v_proj", "out_proj"), self.projections, strict=True)
            paths = {projection: f"{target}.{target_name}.{p}" for projection, p in pairs}
            rules += attention(f"{source}.{name}", paths, self.bias)
            rules += norm(f"{source}.{name}_residual.norm", norm_path, self.gain, self.shift)
        rules += linear(f"{source}.feed_forward.inner_proj", f"{target}.{self.inner}")
        rules += linear(f"{source}.feed_forward.outer_proj", f"{target}.{self.outer}")
        return rules + norm(f"{source}.feed_forward_residual.norm", norms[-1], self.gain, self.shift)


def table(side: str, target: str) -> Rule:
    """The rule of one side's fixed position table (P, D), which the file stores as (1, P, D)."""
    return Rule((f"{side}_input.positions.table",), (target,), _AS_BATCH)


def one_table(target: str) -> Rule:
    """The rule of a fixed position table for both sides, which the file stores once."""
    return Rule(("src_input.positions.table", "tgt_input.positions.table"), (target,), _copies(2, 1))


def count(arrays: Named, pattern: str) -> int:
    """The number of arrays numbered 0, 1, ... at `#` in the pattern. Raises: KeyError if a number is missing."""
    expression = re.escape(pattern).replace("\\#", r"(\d+)")
    numbers = {int(match[1]) for name in arrays if (match := re.match(expression, name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise KeyError(pattern)
    return len(numbers)


def _formula(config: TransformerConfig) -> np.ndarray:
    """The position table of a model that twinax trained."""
    shape = (config.table_length, config.d_model)
    return POSITION_TABLES["sinusoidal_interleaved"](*shape).astype(config.param_dtype)


_AS_BATCH = Transform(lambda arrays: [arrays[0][None]], lambda arrays: [arrays[0][0]])


def _copies(sources: int, targets: int) -> Transform:
    """One tensor that is stored under several names on one side. Raises: ConversionError if the copies differ."""

    def to(number: int) -> Callable[..., list[np.ndarray]]:
        def copy(arrays: Any) -> list[np.ndarray]:
            first = np.ascontiguousarray(arrays[0])
            if any(np.ascontiguousarray(a).tobytes() != first.tobytes() for a in arrays[1:]):
                raise ConversionError("copies of one tensor differ: a tied embedding, or position tables")
            return [arrays[0]] * number

        return copy

    return Transform(to(targets), to(sources))
