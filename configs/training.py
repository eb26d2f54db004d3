"""The training config that both frameworks share: loss, optimizer, schedule, step."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..backend.errors import ConfigError
from .registry import PUBLISHED
from .schema import TransformerConfig
from .summary import Described
from .validation import check_field_types

Smoothing = Literal["all", "others", "others_but_padding"]
Optimizer = Literal["adam", "adamw"]
Decayed = Literal["matrices", "all"]
WithoutGradient = Literal["skip", "decay"]
ClipRule = Literal["torch", "optax"]
Schedule = Literal["constant", "noam", "inverse_sqrt", "cosine", "linear", "step", "noam_per_part"]
ENDING = ("cosine", "linear")  # schedules that end at `total_updates`
Reduction = Literal["tokens", "sum", "parts"]
Consistency = Literal["none", "simcut", "r_drop"]
# Source: Gao et al. 2022 (SimCut); Liang et al. 2021 (R-Drop).
CONSISTENCY_WEIGHTS = {"none": 0.0, "simcut": 3.0, "r_drop": 5.0}


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingConfig(Described):
    """The settings of an update; with the model, the data and the seed they determine every update.

    Raises:
        ConfigError: a field has an invalid value; names field, value and what is allowed.
    """

    # Loss.
    label_smoothing: float = 0.0  # probability mass moved from the label to other tokens
    smoothing: Smoothing = "all"  # tokens that share this mass
    consistency: Consistency = "none"  # divergence of two passes of each batch, added to the loss; twice the tokens
    consistency_weight: float | None = None  # factor of the divergence; None: 3 for simcut, 5 for r_drop
    cutoff: float = 0.05  # simcut: probability of zeroing a token's embedding in the second pass

    # Optimizer.
    optimizer: Optimizer = "adam"  # weight_decay is an L2 gradient in adam, decoupled in adamw, as in torch.optim
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    decayed: Decayed = "matrices"  # matrices: neither norms nor biases
    without_gradient: WithoutGradient = "skip"  # parameters without a gradient; torch skips them, optax decays them
    clip_norm: float | None = None  # largest norm of all gradients together; None: not clipped
    clip_rule: ClipRule = "torch"  # torch: times clip_norm / (norm + 1e-6); optax: times clip_norm / norm

    # Schedule of the learning rate.
    schedule: Schedule = "noam"
    learning_rate: float = 1.0  # after warm-up; noam: the factor of d_model^-0.5
    warmup_updates: int = 4000
    total_updates: int | None = None  # update at which cosine and linear end, warm-up included; None: the run's last
    final_learning_rate: float = 0.0  # learning rate at the end of cosine and linear
    step_updates: int | None = None  # step: updates between two decays; None: one epoch of the run
    step_factor: float = 0.1  # step: factor of each decay
    first_update: Literal[0, 1] = 1  # n of the first update in the schedule's formula; torch's schedulers use 0

    # The step.
    accumulation: int = 1  # micro-batches per update, computed one after another
    reduction: Reduction = "tokens"  # gradient of: the mean over tokens; the sum; the sum of the micro-batches' means
    seed: int = 0  # seed of dropout; in a run, of the initial weights and the order of the data too

    def __post_init__(self) -> None:
        check_field_types(self)
        _check_ranges(self)
        _check_schedule(self)

    @property
    def passes(self) -> int:
        """Forward passes of each batch per update."""
        return 1 if self.consistency == "none" else 2

    @property
    def divergence_weight(self) -> float:
        """The factor of the divergence of two passes; 0: there is one pass."""
        weight = self.consistency_weight
        return CONSISTENCY_WEIGHTS[self.consistency] if weight is None or self.passes == 1 else weight

    @classmethod
    def published(cls, name: str, *, as_published: bool, **changes: Any) -> "TrainingConfig":
        """The training config of a published system, as published or with its mistakes repaired, with fields changed.

        Raises:
            ConfigError: there is no such system, or a value is invalid.
        """
        recipe = PUBLISHED.find("published", name)
        return replace(recipe.training, **{**({} if as_published else recipe.training_repairs), **changes})

    @classmethod
    def like_torch(cls, optimizer: Any, **changes: Any) -> "TrainingConfig":
        """The config whose updates are those of a `torch.optim.Adam` or `AdamW`, at its learning rate, with changes.

        Two groups, of which the one with parameters of one dimension has no weight decay, become `decayed="matrices"`.

        Raises:
            ConfigError: it is another optimizer, or its groups have other settings; names the setting.
        """
        kind, groups = type(optimizer).__name__, getattr(optimizer, "param_groups", [])
        if kind not in ("Adam", "AdamW"):
            raise ConfigError(f"optimizer={kind}: must be torch.optim.Adam or AdamW")
        for name in ("lr", "betas", "eps", "amsgrad", "maximize"):
            values = {group[name] for group in groups}
            rule = "must be False" if name in ("amsgrad", "maximize") else "must be the same in all groups"
            if len(values) > 1 or ("be False" in rule and True in values):
                raise ConfigError(f"{name}={', '.join(map(repr, sorted(values)))}: {rule}")
        decays = {(p.ndim > 1, float(group["weight_decay"])) for group in groups for p in group["params"]}
        rates = {decay for _, decay in decays}
        is_matrices = len(rates) == 2 and decays == {(True, max(rates)), (False, 0.0)}
        if len(rates) > 1 and not is_matrices:
            raise ConfigError(
                f"weight_decay={sorted(rates)}: must be one value, or 0 for the parameters of one dimension"
            )
        group = groups[0]
        fields = {"optimizer": kind.lower(), "beta1": float(group["betas"][0])}
        fields |= {
            "beta2": float(group["betas"][1]),
            "eps": float(group["eps"]),
            "weight_decay": max(rates),
            "decayed": "matrices" if is_matrices else "all",
        }
        fields |= {"schedule": "constant", "learning_rate": float(group["lr"]), "warmup_updates": 0}
        return cls(**fields | changes)


def _check_ranges(config: TrainingConfig) -> None:
    for name in ("label_smoothing", "beta1", "beta2", "cutoff"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value!r}: must be at least 0 and below 1")
    for name in ("eps", "clip_norm", "learning_rate", "step_factor", "consistency_weight"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r}: must be a finite number above 0")
    for name in ("weight_decay", "final_learning_rate"):
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r}: must be a finite number of at least 0")
    minima: dict[str, Any] = {"warmup_updates": 0, "total_updates": 1, "step_updates": 1, "accumulation": 1, "seed": 0}
    for name, minimum in minima.items():
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name}={value!r}: must be at least {minimum}")
    if config.seed >= 2**32:
        raise ConfigError(f"seed={config.seed}: must be below 2^32")


def _check_schedule(config: TrainingConfig) -> None:
    if config.schedule in ("noam", "inverse_sqrt", "noam_per_part") and config.warmup_updates == 0:
        raise ConfigError(f"schedule={config.schedule!r}: needs warmup_updates of at least 1")
    if config.total_updates is not None and config.warmup_updates >= config.total_updates:
        raise ConfigError(
            f"warmup_updates={config.warmup_updates}: must be below total_updates={config.total_updates}, "
            "or training ends during warm-up"
        )


def check_trainable(model: TransformerConfig) -> None:
    """Raises: ConfigError if the model's dtype is too narrow for Adam."""
    if model.param_dtype == "float16":
        raise ConfigError(
            "param_dtype='float16': squares of gradients do not fit into float16; train with param_dtype='float32' and "
            "compute_dtype='bfloat16'"
        )
