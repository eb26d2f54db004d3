"""A training that moves to `transformers`' Trainer and back, against one that stays: losses and weights in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.support.conversion import VARIANTS, random_model
from parity_tests.support.trajectories import LOSS_BOUND, PARAMETER_BOUND
from twinax import convert
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.checkpoint import Checkpoint, Training
from twinax.convert.optimizers.adam import find_adam, put_adam
from twinax.convert.optimizers.trainer import training_arguments
from twinax.flax_transformer.model import Transformer
from twinax.parity.functions import random_batch
from twinax.parity.oracles.transformers import load_model, with_float64_norms
from twinax.train.step.step import Batch, Metrics, TrainState, init_state, make_train_step

UPDATES = 50  # of each of the three parts
SENTENCES, SOURCE, TARGET = 5, 7, 6
_IGNORED = -100  # label that the loss of `transformers` ignores
_DROPOUT = (
    "dropout",
    "dropout_rate",
    "attention_dropout",
    "activation_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
)


@dataclass(frozen=True)
class Handover:
    """The largest differences of a run in three parts (twinax, Trainer, twinax) from a run in twinax alone."""

    name: str
    schedule: str
    weight_decay: float
    loss: float  # of any update after the first part
    parameters: float  # at the end, relative to the largest parameter
    moments: float  # at the end, relative to the largest of each

    @property
    def ok(self) -> bool:
        """Whether losses and parameters are within the bounds of trajectories."""
        return self.loss <= LOSS_BOUND and self.parameters <= PARAMETER_BOUND


def measure(name: str, folder: Path, updates: int = UPDATES, **settings: Any) -> Handover:
    """The handover of a variant of a family, with `updates` per part and `settings` of TrainingConfig."""
    write_model(name, folder / "first")
    defaults: dict[str, Any] = {"optimizer": "adamw", "schedule": "linear", "learning_rate": 3e-3, "clip_norm": 1.0}
    defaults |= {"first_update": 0, "warmup_updates": max(updates // 5, 1), "total_updates": 3 * updates}
    training = TrainingConfig(**{**defaults, **settings})
    with jax.enable_x64(True):
        start = convert.load(folder / "first")
        run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=start.config, training=training)
        reference = _Here(start, run)
        expected = [reference.update(number) for number in range(updates)]
        there, back = folder / f"checkpoint-{updates}", folder / "trainer" / f"checkpoint-{2 * updates}"
        convert.save(reference.checkpoint(start), there, layout=VARIANTS[name][0])
        expected += [reference.update(number) for number in range(updates, 3 * updates)]
        losses = train_there(there, start, run, folder / "trainer", 2 * updates)
        resumed = convert.load(back, run=run)
        last = _Here(resumed, run)
        losses += [last.update(number) for number in range(2 * updates, 3 * updates)]
        ends = [side.checkpoint(start) for side in (last, reference)]
    assert all(end.training is not None for end in ends)
    moments = max(_difference(*(getattr(end.training, key) for end in ends)) for key in ("exp_avg", "exp_avg_sq"))
    loss = float(np.abs(np.array(losses) - np.array(expected[updates:])).max())
    parameters = _difference(*(end.arrays for end in ends))
    return Handover(name, training.schedule, training.weight_decay, loss, parameters, moments)


def write_model(name: str, directory: Path) -> None:
    """Write a variant of a family in float64, without dropout."""
    model = random_model(name).double()
    for field in _DROPOUT:
        if hasattr(model.config, field):
            setattr(model.config, field, 0.0)
    model.save_pretrained(directory)


@lru_cache
def _step(run: RunConfig) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    return make_train_step(run.model, run.training)


class _Here:
    """A training with the twins' jitted step."""

    def __init__(self, checkpoint: Checkpoint, run: RunConfig):
        self.run, self.step = run, _step(run)
        arrays = {name: jnp.asarray(array) for name, array in checkpoint.arrays.items()}
        self.state: TrainState = init_state(Transformer.from_arrays(run.model, arrays), run.training)
        if (training := checkpoint.training) is not None:
            optimizer = put_adam(self.state.optimizer, training.count, training.exp_avg, training.exp_avg_sq)
            self.state = self.state._replace(optimizer=optimizer, update=jnp.asarray(training.update, jnp.int32))

    def update(self, number: int) -> float:
        """Make an update; return its loss in nats per token."""
        self.state, metrics = self.step(self.state, batch(self.run, number))
        return float(metrics.loss)

    def checkpoint(self, source: Checkpoint) -> Checkpoint:
        """The checkpoint that the run would save; documents are those of `source`."""
        arrays = {name: np.asarray(a) for name, a in {**self.state.buffers, **self.state.params}.items()}
        adam: Any = find_adam(self.state.optimizer)
        update = int(self.state.update)
        count, means, squares = (jax.tree.map(np.asarray, part) for part in (adam.count, adam.mu, adam.nu))
        training = Training(self.run, update, self.run.training.seed, (0, update), int(count), means, squares)
        return replace(source, arrays=arrays, training=training)


def batch(run: RunConfig, number: int) -> Batch:
    """Random sentences of different lengths; each update has others."""
    drawn = random_batch(run.model, np.random.default_rng(number), SENTENCES, SOURCE, TARGET)
    rows: Any = np.arange(SENTENCES) + SENTENCES * number
    arrays: Any = (drawn.src_tokens, drawn.tgt_tokens, drawn.labels, rows)
    return Batch(*arrays)


def train_there(directory: Path, checkpoint: Checkpoint, run: RunConfig, out: Path, last_update: int) -> list[float]:
    """Resume in Trainer from a directory, on the run's batches; save after `last_update`; return the losses.

    The sentences of a batch are contiguous in micro-batches; in a run, a micro-batch has every n-th.
    """
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []
    settings = training_arguments(run)
    parts = settings["gradient_accumulation_steps"]

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(rows)

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss: Any = super().compute_loss(*arguments, **options)
            losses.append(float(loss))
            return loss

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == last_update

    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=SENTENCES // parts,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    model = with_float64_norms(load_model(directory, checkpoint))
    for name, parameter in model.named_parameters():  # `transformers` 5 does not freeze the tables of a loaded model
        if "embed_positions" in name and run.model.positions != "learned":
            parameter.requires_grad_(False)
    rows: Any = [row for number in range(arguments.max_steps) for row in _rows(run, number)]
    trainer = InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=str(directory))
    return [sum(losses[first : first + parts]) for first in range(0, len(losses), parts)]


def _rows(run: RunConfig, number: int) -> list[dict[str, torch.Tensor]]:
    """The sentences of a batch, as Trainer's default collator stacks them."""
    src, tgt, labels = (np.asarray(array) for array in batch(run, number)[:3])
    arrays = {"input_ids": src, "attention_mask": (src != run.model.pad_id).astype(np.int64), "decoder_input_ids": tgt}
    arrays["labels"] = np.where(labels == run.model.pad_id, _IGNORED, labels)
    return [{name: torch.from_numpy(array[row]) for name, array in arrays.items()} for row in range(SENTENCES)]


def _difference(arrays: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest expected number."""
    largest = max(float(np.abs(array).max()) for array in expected.values())
    return max(float(np.abs(arrays[name] - array).max()) for name, array in expected.items()) / largest
