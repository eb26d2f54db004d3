"""Checkpoints of `transformers`' Trainer: Adam's state and the schedule beside the weights of a family.

`optimizer.pt` holds the state of AdamW over two groups: the parameters with weight decay, then biases and norms, each
in the order in which the model's class registers them. `scheduler.pt` holds the position in a schedule, but not its
kind, which is in `training_args.bin`: a pickle with code, which is never read. `trainer_state.json` counts updates.

Source: `transformers.Trainer`, versions 4.55 and 5.23.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...backend.errors import ConfigError, ConversionError, MissingPackageError
from ...backend.torch_package import require_torch
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...configs.training import TrainingConfig
from ...flax_transformer.unused_parameters import without_gradient
from ...formulas.schedules import learning_rate
from ..arrays.lazy import Spec
from ..checkpoint import CONFIG, MOMENTS, Checkpoint, Training
from ..layouts.canonical import up_to_rounding
from ..layouts.foreign import not_written
from ..layouts.hugging_face import Family
from ..port import flax_specs
from ..rules import target_specs, translate
from ..weight_files.reading import read_torch
from .torch_adam import Moments, check_settings, groups_of, moments_by_name, state_dict_of

OPTIMIZER, SCHEDULER, STATE = FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json")
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
# The parts of names, in the order in which the classes register modules and parameters.
_ORDER = """
model shared encoder decoder lm_head embed_tokens embed_positions layers block layernorm_embedding layer
SelfAttention EncDecAttention DenseReluDense layer_norm
self_attn self_attn_layer_norm encoder_attn encoder_attn_layer_norm fc1 fc2 final_layer_norm
k_proj v_proj q_proj out_proj q k v o relative_attention_bias wi wi_0 wi_1 wo weight bias
"""
_RANK = {part: rank for rank, part in enumerate(_ORDER.split())}
_SENTENCES = 8  # Trainer's default; it refuses a state without a batch size, and batches of a run vary in size
_CLOSE = 1e-9  # relative difference of learning rates that rounding can cause


def has_state(path: Path) -> bool:
    """Whether a directory has the optimizer's state of a Trainer."""
    return (path / OPTIMIZER).is_file()


def parameter_groups(names: list[str]) -> tuple[list[str], list[str]]:
    """(names of the parameters with weight decay, the others), each in Trainer's order."""
    ordered = sorted(names, key=lambda name: [int(p) if p.isdecimal() else _RANK[p] for p in name.split(".")])
    undecayed = [name for name in ordered if _NO_DECAY.search(name)]
    return [name for name in ordered if name not in undecayed], undecayed


def training_arguments(run: RunConfig) -> dict[str, Any]:
    """The `TrainingArguments` with which Trainer, version 5, makes the updates of a run.

    `without_gradient` has no counterpart: every parameter of a family's model has a gradient.

    Raises:
        ConversionError: Trainer has no such schedule, loss or clipping.
    """
    config, warm_up = run.training, run.training.warmup_updates
    if config.consistency != "none":
        raise ConversionError(f"consistency={config.consistency!r}: transformers' Trainer has no such loss")
    if config.clip_norm is not None and config.clip_rule != "torch":
        raise ConversionError(f"clip_rule={config.clip_rule!r}: transformers' Trainer clips gradients as torch does")
    last, rate, options = config.final_learning_rate, config.learning_rate, {}
    match config.schedule:
        case "constant":
            kind = "constant_with_warmup" if warm_up else "constant"
        case "linear":
            kind, options = ("polynomial", {"lr_end": last, "power": 1.0}) if last else ("linear", {})
        case "cosine":
            kind, options = ("cosine_with_min_lr", {"min_lr": last}) if last else ("cosine", {})
        case "inverse_sqrt":
            kind = "inverse_sqrt"
        case "noam":  # r / sqrt(D w) · min(n / w, sqrt(w / n))
            kind, rate = "inverse_sqrt", rate * (run.model.d_model * warm_up) ** -0.5
        case schedule:
            raise ConversionError(f"schedule={schedule!r}: transformers' Trainer has no such schedule")
    return {
        "learning_rate": rate,
        "lr_scheduler_type": kind,
        **({"lr_scheduler_kwargs": options} if options else {}),
        "warmup_steps": warm_up,
        "max_steps": config.total_updates or run.loop.updates or -1,
        "adam_beta1": config.beta1,
        "adam_beta2": config.beta2,
        "adam_epsilon": config.eps,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.clip_norm or 0.0,
        "label_smoothing_factor": _smoothing_factor(config, run.model.tgt_vocab_size),
        "gradient_accumulation_steps": _accumulation_steps(config),
    }


def _smoothing_factor(config: TrainingConfig, vocab_size: int) -> float:
    """Trainer's smoothing, which all V tokens share. e shared by V - 1 has the same gradients as e V / (V - 1).

    Source: `transformers.trainer_pt_utils.LabelSmoother`.
    """
    smoothing = config.label_smoothing
    if not smoothing or config.smoothing == "all":
        return smoothing
    if config.smoothing == "others":
        return smoothing * vocab_size / (vocab_size - 1)
    raise ConversionError(f"smoothing={config.smoothing!r}: transformers' Trainer smooths over padding too")


def _accumulation_steps(config: TrainingConfig) -> int:
    """Trainer's number of micro-batches. With label smoothing, it divides by the tokens of all of them.

    Without, the loss of a micro-batch is the mean that the family's class computes, and Trainer adds these means.
    """
    if config.reduction == "tokens":
        return config.accumulation if config.label_smoothing else 1
    if config.reduction == "parts" and (config.accumulation == 1 or not config.label_smoothing):
        return config.accumulation
    smoothed = "with label smoothing, " if config.reduction == "parts" else ""
    reason = f"{smoothed}transformers' Trainer divides the loss by the number of tokens"
    raise ConversionError(f"reduction={config.reduction!r}: {reason}")


def with_training(checkpoint: Checkpoint, path: Path, target: Family, run: RunConfig) -> Checkpoint:
    """The checkpoint of a Trainer's directory with the state that a run resumes from.

    Raises:
        ConversionError: files are missing or damaged, or the model, the settings of AdamW or the learning rate are not
            those of the run, or Trainer cannot make the run's updates.
    """
    check_model(checkpoint.config, run.model)
    if missing := [name for name in (OPTIMIZER, SCHEDULER) if not (path / name).is_file()]:
        raise ConversionError(f"{path}: has no {missing[0]}, from which a training resumes")
    checkpoint = replace(checkpoint, config=run.model)
    model = _Parameters(target, checkpoint)
    with _named(path):
        arguments = training_arguments(run)
    with _named(path / OPTIMIZER):
        state = read_torch(path / OPTIMIZER)
        sizes, expected = ([len(g["params"]) for g in groups_of(state)], [len(names) for names in model.groups])
        if sizes != expected:
            tables = target.position_tables(run.model) if sizes == [expected[0] + 2, expected[1]] else {}
            advice = "; with the position tables, which must be frozen: requires_grad_(False)" if tables else ""
            raise ConversionError(f"has groups of {sizes} parameters; of this model, they have {expected}{advice}")
        moments = moments_by_name(
            state, [name for names in model.groups for name in names], model.all_specs, model.absent
        )
        check_settings(groups_of(state), (run.training.weight_decay, 0.0), run.training)
        model.check_decay(run)
    with _named(path / SCHEDULER):
        update = _update(read_torch(path / SCHEDULER), run, arguments)
    exp_avg, exp_avg_sq = (model.from_file(arrays) for arrays in moments[1:])
    training = Training(run, update, run.training.seed, (0, update), moments.updates, exp_avg, exp_avg_sq)
    return replace(checkpoint, training=training, skipped=())


def unsupported_training(checkpoint: Checkpoint, target: Family) -> str | None:
    """Why a family's directory of this checkpoint does not store its training; None if it does."""
    if checkpoint.training is None:
        return None
    if checkpoint.config.output_bias == "learned":
        return f"output_bias='learned': {target.architecture} does not train its output bias"
    try:
        require_torch("writing it")
        training_arguments(checkpoint.training.run)
        _Parameters(target, checkpoint).check_decay(checkpoint.training.run)
    except (ConversionError, MissingPackageError) as error:
        return str(error)
    return None


def trainer_files(checkpoint: Checkpoint, target: Family) -> dict[str, bytes]:
    """The files from which `Trainer.train(resume_from_checkpoint=DIR)` resumes a training, by name.

    A training that has an `unsupported_training` has no files.
    """
    training = checkpoint.training
    if training is None or unsupported_training(checkpoint, target) is not None:
        return {}
    run, number = training.run, training.update + training.run.training.first_update
    model, arguments = _Parameters(target, checkpoint), training_arguments(run)
    rate = float(learning_rate(training.update, run.training, checkpoint.config.d_model, np))
    rates = {"lr": rate, "initial_lr": arguments["learning_rate"]}
    scheduler = {
        "base_lrs": [rates["initial_lr"]] * 2,
        "last_epoch": number,
        "_step_count": number + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [rate] * 2,
        "lr_lambdas": [None] * 2,
    }
    document = {"global_step": training.update, "max_steps": arguments["max_steps"], "epoch": training.position[0]}
    document |= {
        "train_batch_size": _SENTENCES,
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
    }
    return {
        OPTIMIZER: _torch_bytes(_optimizer_state(training, model, rates)),
        SCHEDULER: _torch_bytes(scheduler),
        STATE: (json.dumps(document, indent=2, sort_keys=True) + "\n").encode(),
    }


class _Parameters:
    """The trained parameters of a family's model, by the names in its file."""

    def __init__(self, target: Family, checkpoint: Checkpoint):
        config = checkpoint.config
        specs = flax_specs(config, trained_only=True)
        settings = checkpoint.documents.get(CONFIG) or target.settings(config)
        self.specs, self.rules = specs, [rule for rule in target.rules(config) if rule.source[0] in specs]
        self.file_specs = target_specs(self.rules, specs)
        table = Spec((config.src_vocab_size, config.d_model), config.param_dtype)
        unused = dict.fromkeys(target.unused(settings, config), table)
        self.all_specs = self.file_specs | unused
        self.groups = parameter_groups([*self.all_specs])
        untrained = without_gradient(config)
        self.absent = {*unused, *(rule.target[0] for rule in self.rules if rule.source[0] in untrained)}

    def check_decay(self, run: RunConfig) -> None:
        """Raises: ConversionError if Trainer decays other parameters, or in another way."""
        config = run.training
        if not config.weight_decay:
            return
        if config.optimizer != "adamw":
            raise ConversionError(f"optimizer={config.optimizer!r}: transformers' Trainer has weight decay as adamw")
        if config.decayed != "matrices":
            raise ConversionError(f"decayed={config.decayed!r}: transformers' Trainer decays neither norms nor biases")
        if name := next((name for name in self.groups[1] if len(self.all_specs[name].shape) > 1), None):
            reason = f"transformers' Trainer does not decay {name}, and twinax decays all matrices"
            raise ConversionError(f"weight_decay={config.weight_decay}: {reason}")

    def from_file(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """An optimizer's arrays by Flax name; zeros for parameters that have none."""
        by_name = {name: arrays[name] if name in arrays else np.zeros(*spec) for name, spec in self.file_specs.items()}
        return translate([rule.inverse for rule in self.rules], by_name, self.file_specs)

    def to_file(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """An optimizer's arrays by the names in the file."""
        return translate(self.rules, arrays, self.specs)


def check_model(config: TransformerConfig, expected: TransformerConfig) -> None:
    """Raises: ConversionError if a run's model, `expected`, is trained otherwise than a checkpoint's, dropout aside."""
    ignored = {*not_written(expected), "forced_bos_id", "forced_eos_id"}  # of decoding alone
    names = [f.name for f in fields(config) if f.name not in ignored and "drop" not in f.name]
    first, second = up_to_rounding(config), up_to_rounding(expected)
    differences = [name for name in names if getattr(first, name) != getattr(second, name)]
    if differences:
        name = differences[0]
        raise ConversionError(f"{name}={getattr(first, name)!r}: the run's model has {getattr(second, name)!r}")


def _update(scheduler: Any, run: RunConfig, arguments: Mapping[str, Any]) -> int:
    """The number of updates at a scheduler's position. Raises: ConversionError if its rates are not the run's."""
    base, rate, number = (
        scheduler.get(name) if isinstance(scheduler, Mapping) else None
        for name in ("base_lrs", "_last_lr", "last_epoch")
    )
    if not (isinstance(base, list) and isinstance(rate, list) and base and rate and type(number) is int):
        raise ConversionError("is not the state of a schedule that depends on the number of updates alone")
    update = number - run.training.first_update
    if update < 0:
        raise ConversionError(f"stands before the first update; the run has first_update={run.training.first_update}")
    try:
        expected = float(learning_rate(update, run.training, run.model.d_model, np))
    except ConfigError as error:
        raise ConversionError(str(error)) from None
    for name, value, own in (
        ("base learning rate", base[0], arguments["learning_rate"]),
        (f"learning rate of update {number}", rate[0], expected),
    ):
        if not math.isclose(value, own, rel_tol=_CLOSE, abs_tol=1e-300):
            raise ConversionError(
                f"has the {name} {value:.9g}, and the run's schedule {own:.9g}; set its --training.schedule, "
                "--training.learning-rate, --training.warmup-updates, --training.total-updates and "
                "--training.first-update as in Trainer, where the first update is 0"
            )
    return update


def _optimizer_state(training: Training, model: _Parameters, rates: Mapping[str, float]) -> dict[str, Any]:
    """The state dict of Trainer's AdamW."""
    arrays = (model.to_file(getattr(training, key)) for key in MOMENTS)
    decays, moments = (training.run.training.weight_decay, 0.0), Moments(training.count, *arrays)
    return state_dict_of(model.groups, decays, moments, model.absent, training.run.training, rates)


def _torch_bytes(content: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors with the file's path, once."""
    try:
        yield
    except ConversionError as error:
        raise ConversionError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(f"{path}: is not as Trainer writes it: {' '.join(str(error).split())[:200]}") from None
