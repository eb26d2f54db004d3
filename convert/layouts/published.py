"""What the layouts of the five published systems have in common; each has its rules in a file of its own.

Their files are bare state dicts. Sizes are read from the arrays. What the arrays do not determine, such as the number
of heads, is assumed to be the published config's.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...configs.errors import ConversionError
from ...configs.schema import TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..port import flax_specs
from ..rules import IDENTITY, TRANSPOSE, Rule, Transform, target_specs, translate
from .hugging_face import canonical

Named = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
# Config fields that every system's own settings choose, or that no computation of it reads.
_FREE = (
    *("src_vocab_size", "tgt_vocab_size", "d_model", "num_heads", "head_dim", "v_head_dim", "d_ff"),
    *("num_encoder_layers", "num_decoder_layers", "max_length", "position_table_length"),
    *("param_dtype", "compute_dtype"),
    *("pad_id", "bos_id", "eos_id", "decoder_start_id", "forced_bos_id", "forced_eos_id"),
)

IDS = ("pad_id", "bos_id", "eos_id")
# Config fields that change trainings alone.
_TRAINING_ONLY = (
    *("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout", "dropout_generator"),
    *("linear_init", "embedding_init"),
)


@dataclass(frozen=True)
class PublishedLayout:
    """A system's names."""

    rules: Callable[[TransformerConfig], list[Rule]]  # from our names to theirs
    # what the arrays say of the config, as published or repaired, and of so many heads
    fields: Callable[[Named, bool, int], dict[str, Any]]
    mark: str  # of a name that no other layout has; a regular expression
    parts: tuple[str, ...] = ()  # first parts of names that may be others
    unused: str = "(?!)"  # names of arrays that no computation reads; a regular expression
    prefixes: Callable[[Collection[str]], dict[str, str]] = lambda names: {}  # what stands for `parts`
    tables: Callable[[TransformerConfig], Arrays] = lambda config: {}  # ours that such a file lacks
    free: tuple[str, ...] = ()  # config fields that its own settings choose
    refusal: Callable[[TransformerConfig, bool], str | None] = lambda config, as_published: None  # of these together
    # (settings beside the state dict in a file of its training, arrays) -> the config fields that they state
    stated: Callable[[Any, Named], dict[str, Any]] = lambda settings, arrays: {}
    # config fields that the arrays of such a model do not determine
    undetermined: Callable[[TransformerConfig], tuple[str, ...]] = lambda config: ("num_heads", *IDS)

    def config(self, name: str, arrays: Named, as_published: bool, given: Mapping[str, Any]) -> TransformerConfig:
        """The config of a state dict and of what is given beside it.

        Raises:
            ConfigError: it is none.
            ConversionError: the state dict lacks an array that says a size.
        """
        if "param_dtype" in given:
            raise ConversionError("param_dtype: the tensors have theirs")
        heads = given.get("num_heads", TransformerConfig.published(name, as_published=as_published).num_heads)
        if type(heads) is not int or heads < 1:
            raise ConversionError(f"num_heads={heads!r}: must be a whole number of at least 1")
        try:
            fields = self.fields(arrays, as_published, heads)
        except ConversionError:
            raise
        except (KeyError, IndexError, ValueError) as error:
            raise ConversionError(
                f"is no whole state dict of {name}: {error} is missing or has a wrong shape"
            ) from None
        dtypes: dict[str, Any] = {"param_dtype": str(next(iter(arrays.values())).dtype)}
        if dtypes["param_dtype"] == "float64":  # the published module computes in it too
            dtypes["compute_dtype"] = "float64"
        if "bos_id" in given:
            dtypes["decoder_start_id"] = given["bos_id"]
        config = TransformerConfig.published(name, as_published=as_published, **{**dtypes, **fields, **given})
        if refusal := self.refusal(config, as_published):
            raise ConversionError(refusal)
        return config

    def assumptions(
        self, name: str, arrays: Named, config: TransformerConfig, as_published: bool | None, given: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """What neither the arrays nor `given` determine, as ("as published", "num_heads=8").

        `config` is the one that was assumed; `as_published` is None where it was not given.
        """
        settings = [f"{field}={getattr(config, field)!r}" for field in self.undetermined(config) if field not in given]
        if as_published is None and self._could_be_repaired(name, arrays, config, given):
            settings.insert(0, "as published")
        return tuple(settings)

    def _could_be_repaired(self, name: str, arrays: Named, config: TransformerConfig, given: Mapping[str, Any]) -> bool:
        """Whether the arrays fit the repaired model too, and that computes something else than `config`."""
        try:
            repaired = self.config(name, arrays, False, given)
        except ValueError:  # it has no model with what is given
            return False
        names = {target for rule in self.rules(repaired) for target in rule.target}
        same = {field: getattr(config, field) for field in _TRAINING_ONLY}
        return names == set(self.split(arrays)[0]) and canonical(repaired.replace(**same)) != canonical(config)

    def read(self, arrays: Named, config: TransformerConfig) -> tuple[Arrays, Arrays]:
        """(our arrays, theirs that no computation reads). Raises: ConversionError, all arrays that do not fit."""
        arrays, unused = self.split(arrays)
        tables, rules = self.tables(config), self.rules(config)
        specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
        return translate([rule.inverse for rule in rules], arrays, target_specs(rules, specs)) | tables, unused

    def write(self, name: str, arrays: Named, config: TransformerConfig) -> Arrays:
        """Their arrays of ours. Raises: ConversionError where the system has no such model, or arrays do not fit."""
        self._check(name, config)
        tables = self.tables(config)
        for table, theirs in tables.items():
            ours = arrays.get(table, theirs)  # where it is missing, `translate` says so
            if not any(np.array_equal(ours, known) for known in (theirs, _formula(config))):
                raise ConversionError(f"{table}: {name} computes its table and cannot hold another")
        specs = {name: spec for name, spec in flax_specs(config).items() if name not in tables}
        return translate(self.rules(config), {n: a for n, a in arrays.items() if n not in tables}, specs)

    def _check(self, name: str, config: TransformerConfig) -> None:
        """Raises: ConversionError, every field in which neither variant of the system is like the config."""
        likest = min((self._problems(name, config, as_published) for as_published in (True, False)), key=len)
        if likest:
            raise ConversionError(f"{name} has no such model:\n  " + "\n  ".join(likest))

    def variant(self, name: str, config: TransformerConfig) -> bool | None:
        """Whether the config is the system's as published; False: as repaired, None: neither."""
        found = (v for v in (True, False) if not self._problems(name, config, v))
        return next(found, None)

    def _problems(self, name: str, config: TransformerConfig, as_published: bool) -> list[str]:
        """Every field in which a variant of the system is not like the config."""
        free = {field: getattr(config, field) for field in (*_FREE, *_TRAINING_ONLY, *self.free)}
        like, ours = canonical(TransformerConfig.published(name, as_published=as_published, **free)), canonical(config)
        refusal = self.refusal(config, as_published)
        apart = (f.name for f in fields(config) if getattr(ours, f.name) != getattr(like, f.name))
        problems = [f"{name}={getattr(ours, name)!r}: there it is {getattr(like, name)!r}" for name in apart]
        return problems if refusal is None else [*problems, refusal]

    def split(self, arrays: Named) -> tuple[Arrays, Arrays]:
        """(arrays that count, arrays that no computation reads)."""
        unused = {name: a for name, a in arrays.items() if re.fullmatch(self.unused, name)}
        return {name: a for name, a in arrays.items() if name not in unused}, unused


def linear(ours: str, theirs: str, bias: bool = True) -> list[Rule]:
    """A torch.nn.Linear."""
    rules = [Rule((f"{ours}.kernel",), (f"{theirs}.weight",), TRANSPOSE)]
    return [*rules, Rule((f"{ours}.bias",), (f"{theirs}.bias",))] if bias else rules


def norm(ours: str, theirs: str, gain: str = "weight", shift: str = "bias") -> list[Rule]:
    """A norm with gain and shift."""
    return [Rule((f"{ours}.scale",), (f"{theirs}.{gain}",)), Rule((f"{ours}.bias",), (f"{theirs}.{shift}",))]


def embedding(ours: str, *theirs: str) -> Rule:
    """A table that the file holds under one name, or under several as one tensor that is tied."""
    return Rule((f"{ours}.embedding",), theirs, IDENTITY if len(theirs) == 1 else _copies(1, len(theirs)))


def attention(ours: str, theirs: Mapping[str, str], bias: bool) -> list[Rule]:
    """An attention of four linear maps; `theirs` names those of q_proj, k_proj, v_proj and out_proj."""
    return [rule for name, there in theirs.items() for rule in linear(f"{ours}.{name}", there, bias)]


@dataclass(frozen=True)
class LayerNames:
    """How a system calls the parts of a layer; in `norms`, # is a number, `first` at the first attention."""

    projections: tuple[str, str, str, str]  # q_proj, k_proj, v_proj, out_proj
    bias: bool  # of these
    inner: str
    outer: str
    norms: str
    first: int = 1
    gain: str = "weight"
    shift: str = "bias"

    def rules(self, ours: str, theirs: str, attentions: Mapping[str, str]) -> list[Rule]:
        """Those of a layer with these attentions, ours and theirs."""
        rules = []
        norms = [f"{theirs}.{self.norms.replace('#', str(self.first + i))}" for i in range(len(attentions) + 1)]
        for (name, there), its_norm in zip(attentions.items(), norms, strict=False):
            named = zip(("q_proj", "k_proj", "v_proj", "out_proj"), self.projections, strict=True)
            rules += attention(f"{ours}.{name}", {own: f"{theirs}.{there}.{p}" for own, p in named}, self.bias)
            rules += norm(f"{ours}.{name}_residual.norm", its_norm, self.gain, self.shift)
        rules += linear(f"{ours}.feed_forward.inner_proj", f"{theirs}.{self.inner}")
        rules += linear(f"{ours}.feed_forward.outer_proj", f"{theirs}.{self.outer}")
        return rules + norm(f"{ours}.feed_forward_residual.norm", norms[-1], self.gain, self.shift)


def table(side: str, theirs: str) -> Rule:
    """A side's fixed positions (P, D), which the file has as (1, P, D)."""
    return Rule((f"{side}_input.positions.table",), (theirs,), _AS_BATCH)


def one_table(theirs: str) -> Rule:
    """The fixed positions of both sides, which the file has once."""
    return Rule(("src_input.positions.table", "tgt_input.positions.table"), (theirs,), _copies(2, 1))


def count(arrays: Named, pattern: str) -> int:
    """How many numbers a name has at `#`, from 0 on."""
    expression = re.escape(pattern).replace("\\#", r"(\d+)")
    found = {int(match[1]) for name in arrays if (match := re.match(expression, name))}
    if found != set(range(len(found))) or not found:
        raise KeyError(pattern)
    return len(found)


def _formula(config: TransformerConfig) -> np.ndarray:
    """The table of a model that was trained here."""
    shape = (config.table_length, config.d_model)
    return POSITION_TABLES["sinusoidal_interleaved"](*shape).astype(config.param_dtype)


_AS_BATCH = Transform(lambda arrays: [arrays[0][None]], lambda arrays: [arrays[0][0]])


def _copies(ours: int, theirs: int) -> Transform:
    """One tensor that stands under several names on one side. Raises: ConversionError where they differ."""

    def to(number: int) -> Callable[..., list[np.ndarray]]:
        def copy(arrays: Any) -> list[np.ndarray]:
            first = np.ascontiguousarray(arrays[0])
            if any(np.ascontiguousarray(a).tobytes() != first.tobytes() for a in arrays[1:]):
                raise ConversionError("arrays that are one tensor there differ: a tied embedding, or position tables")
            return [arrays[0]] * number

        return copy

    return Transform(to(theirs), to(ours))
