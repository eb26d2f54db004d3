"""The complete config of a training run: data, tokenizer, model, training and loop."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from ..backend.errors import ConfigError
from .data import BatchConfig, CleaningConfig, CorpusConfig, TokenizerConfig
from .execution import ExecutionConfig
from .schema import TransformerConfig
from .sharding import ShardingConfig
from .training import ENDING, TrainingConfig
from .validation import check_field_types

# Functions that migrate a run's JSON object, the model's included, to the next version: the first from 1 to 2.
MIGRATIONS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = ()
RUN_SCHEMA_VERSION = 1 + len(MIGRATIONS)

Metric = Literal["loss", "bleu"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The length of a run and its validation interval. Updates depend on the length if the schedule ends with the run.

    Raises:
        ConfigError: a field has an invalid value, or two contradict each other.
    """

    updates: int | None = None  # length of the run; None: given by epochs
    epochs: int | None = None  # length of the run; None: given by updates; both None: 30 epochs, at least 2,000 updates
    validate_every: int | None = None  # updates per validation and checkpoint; None: one epoch, within 100 to 2,000
    checkpoint_every: int | None = None  # updates between additional checkpoints; None: no additional ones
    translations: int = 200  # validation sentences translated for BLEU at each validation; 0: none
    metric: Metric = "loss"  # validation metric that selects the best checkpoint
    patience: int | None = None  # validations without improvement before the run stops early; None: never
    average: int = 1  # number of last validated checkpoints averaged at the end; 1: no averaging
    swanlab: str | None = None  # SwanLab project that the metrics are logged to; needs twinax[swanlab]

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("updates", "epochs", "validate_every", "checkpoint_every", "patience", "average"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.translations < 0:
            raise ConfigError(f"translations={self.translations}: must be at least 0")
        if self.updates is not None and self.epochs is not None:
            raise ConfigError(f"updates={self.updates}, epochs={self.epochs}: give one of them")
        if self.metric == "bleu" and not self.translations:
            raise ConfigError("metric='bleu': needs translations of at least 1")

    def resolved(self, batches: int) -> "LoopConfig":
        """A copy with every length in updates; `batches` is the number of batches per epoch."""
        updates = self.updates or (self.epochs * batches if self.epochs else max(30 * batches, 2000))
        every = self.validate_every or min(max(batches, 100), 2000)
        return replace(self, updates=updates, epochs=None, validate_every=every)


def _default_model() -> TransformerConfig:
    return TransformerConfig.preset("small")


def _default_training() -> TrainingConfig:
    return TrainingConfig(
        label_smoothing=0.1, schedule="inverse_sqrt", learning_rate=1e-3, warmup_updates=1000, clip_norm=1.0
    )


def fine_tuning_defaults(model: TransformerConfig) -> TrainingConfig:
    """The default settings of a run that starts from trained weights: a low learning rate and a short warm-up.

    learning rate after warm-up: 0.064 / d_model, which is 5e-4 at width 128 and 1.25e-4 at width 512; at most 1e-3
    """
    default = _default_training()
    rate = min(0.064 / model.d_model, default.learning_rate)
    return replace(default, learning_rate=rate, warmup_updates=100)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run. The defaults suit a user's own corpus.

    `train` sets the model's vocabulary sizes and special ids from the tokenizers.

    Raises:
        ConfigError: fields contradict each other.
    """

    corpus: CorpusConfig
    both_directions: bool = False  # also train and validate on every pair with source and target swapped
    init_from: str | None = None  # run, checkpoint or Hugging Face directory that the initial weights are loaded from
    adapter: str | None = None  # directory of a LoRA adapter, merged into the initial weights
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    model: TransformerConfig = field(default_factory=_default_model)
    training: TrainingConfig = field(default_factory=_default_training)
    loop: LoopConfig = field(default_factory=LoopConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        for name in ("init_from", "adapter"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"{name}={value!r}: must be a path or None")
        if not isinstance(self.both_directions, bool):
            raise ConfigError(f"both_directions={self.both_directions!r}: must be true or false")
        if self.adapter is not None and self.init_from is None:
            raise ConfigError(f"adapter={self.adapter!r}: needs init_from, its base model")
        self.execution.check(self.model)
        separate = not self.tokenizer.joint if not self.tokenizer.load else len(self.tokenizer.load) == 2
        if self.model.shared_embeddings and separate:
            raise ConfigError(
                "shared_embeddings=True: needs one tokenizer for both sides; use a joint tokenizer, or set "
                "shared_embeddings=False"
            )
        if self.both_directions and (separate or self.tokenizer.languages):
            cause = "tokenizer.languages" if self.tokenizer.languages else "a tokenizer per side"
            raise ConfigError(
                f"both_directions=True: each side has sentences of both languages, which {cause} would keep apart; use "
                "one tokenizer for both sides"
            )
        for side in ("src", "tgt"):
            name = f"max_{side}_length"
            longest = getattr(self.batches, name)
            if longest is not None and longest > self.model.max_length:
                raise ConfigError(f"{name}={longest}: must not be above the model's max_length={self.model.max_length}")

    def resolved(self, batches: int) -> "RunConfig":
        """A copy with every length in updates; `batches` is the number of batches per epoch."""
        loop, training = self.loop.resolved(batches), self.training
        # Not in __post_init__, so that older runs still load.
        if self.model.cross_mask == "encoder" and loop.translations:
            raise ConfigError(
                f"translations={loop.translations}: a model with cross_mask='encoder' cannot translate; set it to 0"
            )
        if training.schedule in ENDING and training.total_updates is None:
            if (updates := loop.updates or 0) <= training.warmup_updates:
                raise ConfigError(
                    f"warmup_updates={training.warmup_updates}: the run has {updates} updates, and warm-up must end "
                    "earlier; set fewer warmup_updates, or a longer run"
                )
            training = replace(training, total_updates=updates)
        if training.schedule == "step" and training.step_updates is None:
            training = replace(training, step_updates=batches)
        return replace(self, loop=loop, training=training)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON-serializable values, with the schema versions."""
        return {"run_schema_version": RUN_SCHEMA_VERSION, **asdict(self), "model": self.model.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The config of `to_dict`'s values, in this or an older version. Absent fields have their defaults.

        Raises:
            ConfigError: the version is unknown, a field is unknown or missing, or a value is wrong.
        """
        version = values.get("run_schema_version")
        if type(version) is not int or not 1 <= version <= RUN_SCHEMA_VERSION:
            raise ConfigError(f"run_schema_version={version!r}: this twinax reads versions 1 to {RUN_SCHEMA_VERSION}")
        values = {name: value for name, value in values.items() if name != "run_schema_version"}
        for migrate in MIGRATIONS[version - 1 :]:
            values = migrate(values)
        kinds = {
            "corpus": CorpusConfig,
            "cleaning": CleaningConfig,
            "tokenizer": TokenizerConfig,
            "batches": BatchConfig,
            "training": TrainingConfig,
            "loop": LoopConfig,
            "sharding": ShardingConfig,
            "execution": ExecutionConfig,
        }
        values = {"cleaning": {}, "sharding": {}, "execution": {}, **values}  # earlier versions had none
        options = {name: values.pop(name, None) for name in ("init_from", "adapter")}
        options["both_directions"] = values.pop("both_directions", False)
        if mismatch := sorted({*kinds, "model"} ^ set(values)):
            names = ", ".join((*kinds, "model"))
            raise ConfigError(f"the parts of a run are {names}; missing or unknown: {', '.join(mismatch)}")
        parts = {name: _read(kind, values[name], name) for name, kind in kinds.items()}
        return cls(model=TransformerConfig.from_dict(values["model"]), **options, **parts)

    def to_json(self) -> str:
        """The config as a JSON string."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _read(kind: type, values: Any, name: str) -> Any:
    names = {f.name for f in fields(kind)}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: must be a JSON object, not {type(values).__name__}")
    if unknown := sorted(set(values) - names):
        raise ConfigError(f"{name}: has unknown fields {', '.join(unknown)}; its fields are {', '.join(sorted(names))}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def differences(config: Any, reference: Any, prefix: str = "") -> list[str]:
    """Dotted names of the fields in which two configs of one class differ, with both values."""
    lines = []
    for f in fields(config):
        a, b = getattr(config, f.name), getattr(reference, f.name)
        if is_dataclass(a):
            lines += differences(a, b, f"{prefix}{f.name}.")
        elif a != b:
            lines.append(f"{prefix}{f.name}={a!r} and not {b!r}")
    return lines
