"""The loop around the step: batches in, checkpoints and metrics out; after any interruption it resumes bit-exactly.

What belongs to update n is done in this order: the step; its record; where one is due, a checkpoint; then validation.
After a stop, what is missing behind the last checkpoint is done again, with the same result.
"""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from ..configs.errors import CheckpointError, RunError
from ..configs.run import RunConfig
from ..configs.training import check_trainable
from ..flax_transformer.model import Transformer
from .checkpointing.checkpoints import AVERAGED, CHECKPOINTS, Checkpoints, average
from .checkpointing.run_directory import locked, prepare_in
from .compilation_cache import use_compilation_cache
from .data.buckets import Bucket
from .data.dataset import Padded
from .data.prepare import Prepared
from .evaluate import Validation
from .malloc import keep_freed_memory
from .milestones import Milestones
from .partitioning import Placement, like
from .signals import StopSignals
from .step import Metrics, TrainState, explain, init_state, make_train_step
from .tracking.metrics import MetricsLog
from .tracking.plot import PlotTracker
from .tracking.progress import TrainingProgress
from .tracking.swanlab_tracker import SwanLabTracker, check_swanlab
from .tracking.tensorboard_tracker import TensorBoardTracker
from .tracking.tracker import Tracker
from .warm_start import Initial, read_initial


class Outcome(NamedTuple):
    """How a run ended."""

    update: int  # that it reached
    validation: dict[str, Any] | None  # the last; of averaged parameters where there are some
    stopped_by: int | None  # signal; None: it is finished


def train(run: RunConfig, directory: Path, console: Console | None = None, trackers: Sequence[Tracker] = ()) -> Outcome:
    """Trains, or goes on training, in a run directory; `trackers` get the numbers beside the run's own files.

    Raises:
        DataError, ConfigError, CheckpointError: what `run` names cannot be used.
        RunError: the directory is in use or another run's; or a loss is not finite, and its batch is saved there.
    """
    keep_freed_memory()
    console = console or Console(stderr=True)
    check_trainable(run.model)
    if run.loop.swanlab is not None:
        check_swanlab(run.loop.swanlab)
    cache = use_compilation_cache()
    with locked(directory):

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        # Not where there is a checkpoint: then the weights to start from may be gone.
        begins = not any((directory / CHECKPOINTS).glob("[0-9]*"))
        initial = read_initial(run) if begins else None
        if initial is not None and initial.assumed is not None:
            say(initial.assumed)
        prepared = prepare_in(directory, run, initial, say)
        say(describe_devices([device.device_kind for device in jax.devices()]))
        say(describe_shapes(prepared.buckets))
        if begins and (most := prepared.run.loop.updates or 0) < (warmup := run.training.warmup_updates):
            say(
                f"warm-up is {warmup:,} updates and the run has {most:,}: the learning rate never reaches its peak; "
                f"pass --training.warmup-updates {max(most // 10, 1)}"
            )
        say(f"compiled programs are kept in {cache}" if cache else "compiled programs are not kept")
        return _Loop(prepared, directory, initial, console, trackers).go()


def describe_devices(kinds: Sequence[str]) -> str:
    """The devices and how the rows of a batch are split over them, in a line."""
    names = ", ".join(f"{kind} × {count}" for kind, count in Counter(kinds).items())
    share = "all rows" if len(kinds) == 1 else f"1/{len(kinds)} of the rows"
    return f"devices: {names}; each computes {share} of a batch"


def describe_shapes(buckets: Sequence[Bucket]) -> str:
    """The shapes of batches, in a line."""
    shapes = ", ".join(f"{b.sentences}×({b.src_length}+{b.tgt_length})" for b in buckets)
    return f"{len(buckets)} shapes of batches, rows×(source+target): {shapes}"


@dataclass
class _Pending:
    """An update whose numbers were not asked for yet: asking waits for it."""

    update: int
    batch: Padded
    metrics: Metrics


class _Loop:
    """One process's part of a run: the state, and what happens to it in which order."""

    def __init__(
        self,
        prepared: Prepared,
        directory: Path,
        initial: Initial | None,
        console: Console,
        trackers: Sequence[Tracker],
    ):
        self.prepared, self.run, self.directory, self.console = prepared, prepared.run, directory, console
        self.batches, project = prepared.batches(), prepared.run.loop.swanlab
        if project is not None:  # first: it may refuse
            trackers = [SwanLabTracker(project, directory, self.run.to_dict()), *trackers]
        self.step = make_train_step(self.run.model, self.run.training)
        self.validation, self.placement = Validation(prepared), Placement()
        self.state = self._first_state(initial)
        self.checkpoints = Checkpoints(directory / CHECKPOINTS, lambda updates: self.milestones.kept(updates))
        self.update = 0
        if found := self.checkpoints.updates:
            self.update = found[-1]
            self.state = self.checkpoints.restore(self.state, self.update)
            self._check_position()
        self.log = MetricsLog(directory, self.update)
        self.log.add(TensorBoardTracker(directory, self.update), PlotTracker(self.log.records, directory), *trackers)
        self.milestones = Milestones(self.run.loop, self.log.validations)
        self.ready: dict[tuple[int, ...], float] = {}  # seconds until each shape was compiled, or read

    def _first_state(self, initial: Initial | None) -> TrainState:
        if initial is None:
            model = Transformer(self.run.model, rngs=nnx.Rngs(self.run.training.seed))
        else:
            model = initial.model(self.run.model)
        return self.placement.replicate(init_state(model, self.run.training))

    def _check_position(self) -> None:
        """Raises: CheckpointError where state and shapes do not belong together."""
        expected = [self.update, *divmod(self.update, self.batches.an_epoch)]
        if (found := [int(self.state.update), *map(int, self.state.position)]) != expected:
            raise CheckpointError(
                f"{self.checkpoints.directory / str(self.update)}: is after update, epoch and batch {found}, and "
                f"{expected} belongs to this corpus and its shapes"
            )

    def go(self) -> Outcome:
        """Trains until the end, a stop or a loss that is not finite."""
        try:
            with (
                TrainingProgress(self.console, self.update, self.milestones.total) as progress,
                StopSignals(progress.say, progress.close) as stop,
            ):
                self.progress, self.stop = progress, stop
                if self.update:
                    progress.say(f"going on after update {self.update:,}")
                    self._validate_if_due()  # a kill may have come between the checkpoint and this
                if self._goes_on():
                    progress.say(
                        f"validation compiles {self.validation.shapes} shapes of its own, and what translation needs"
                    )
                    self._updates()
                if stop.caught is not None:
                    self._save()
                    self.checkpoints.wait()
                    progress.say(f"stopped and saved after update {self.update:,}; the same command goes on")
                    return Outcome(self.update, self._last_validation(), stop.caught)
                return Outcome(self.update, self._finish(), None)
        finally:
            self.checkpoints.close()
            self.log.close()

    def _goes_on(self) -> bool:
        return self.stop.caught is None and self.milestones.goes_on(self.update)

    def _updates(self) -> None:
        pending: _Pending | None = None
        stream = self.batches.read(self.update, self.run.batches.workers)
        try:
            for batch in stream:
                metrics = self._step(batch)
                if pending is not None:
                    self._record(pending)
                pending = _Pending(self.update, batch, metrics)
                save_due = self.milestones.checkpoint_due(self.update)
                if save_due or self.stop.caught is not None:
                    self._record(pending)
                    pending = None
                    if save_due:
                        self._save()
                    self._validate_if_due()
                    if not self._goes_on():
                        return
        finally:
            stream.close()

    def _step(self, padded: Padded) -> Metrics:
        batch = self.placement.split(padded, self.run.model.pad_id, self.run.training.accumulation)
        shape = (*batch.src_tokens.shape, batch.tgt_tokens.shape[1])
        began, is_new = time.monotonic(), shape not in self.ready
        with self.stop.during("this update's compilation" if is_new else "this update"):
            self.state, metrics = self.step(self.state, batch)
        self.update += 1
        if is_new:
            self.ready[shape] = time.monotonic() - began
            self.progress.compiled(shape, self.ready, len(self.prepared.buckets))
        return metrics

    def _record(self, done: _Pending) -> None:
        metrics = done.metrics
        if (why := explain(self.state, metrics)) is not None:
            path = self.directory / f"batch-{done.update}.npz"
            np.savez(path, **done.batch._asdict())
            raise RunError(
                f"update {done.update}: {why.partition(': ')[2]}; its batch is in {path}. Going on meets it again: "
                "begin anew with a smaller learning_rate, a longer warm-up or clip_norm"
            )
        epoch, number = divmod(done.update - 1, self.batches.an_epoch)
        loss, rate, tokens = float(metrics.loss), float(metrics.learning_rate), int(metrics.tokens)
        record = {"update": done.update, "epoch": epoch, "batch": number, "loss": loss, "tokens": tokens}
        record["checksum"] = crc32(done.batch.src_tokens.tobytes() + done.batch.labels.tobytes())  # which pairs it was
        self.log.write({**record, "gradient_norm": float(metrics.gradient_norm), "learning_rate": rate})
        self.progress.advance(done.update, loss, rate, tokens)

    def _save(self) -> None:
        position = jnp.array(divmod(self.update, self.batches.an_epoch), jnp.int32)
        self.log.flush()
        self.state = self.state._replace(position=like(position, self.state.position))
        self.checkpoints.save(self.state, self.run, self.prepared.tokenizers)

    def _validate_if_due(self) -> None:
        if self.milestones.validation_due(self.update) and self.update not in self.log.validations:
            self._report(self.state, {})

    def _report(self, state: TrainState, notes: dict[str, Any]) -> dict[str, Any]:
        """Measures, writes down and prints."""
        began = time.monotonic()
        self.progress.pause()
        with self.stop.during("this validation"):
            found = self.validation.measure({**state.buffers, **state.params})
        self.log.write({"update": self.update, **notes, "validation": found})
        what = f"average of {', '.join(map(str, notes['averaged']))}" if notes else f"update {self.update:,}"
        self.progress.validated(what, found, time.monotonic() - began)
        return found

    def _last_validation(self) -> dict[str, Any] | None:
        found = self.log.validations
        return dict(found[max(found)]) if found else None

    def _finish(self) -> dict[str, Any] | None:
        """Averages where the run asks for it, and says where everything is."""
        found = self._last_validation()
        self.progress.say(self.milestones.describe_end(self.update))
        self.checkpoints.wait()
        if self.run.loop.average > 1:
            found = self._average(self.run.loop.average)
        self.progress.say(f"everything is in {self.directory}")
        return found

    def _average(self, number: int) -> dict[str, Any] | None:
        """Validates the mean of the last validated checkpoints, and saves it as a checkpoint of its own."""
        chosen = [u for u in sorted(self.log.validations)[-number:] if u in self.checkpoints.updates]
        if len(chosen) < number:
            self.progress.say(f"of {number} checkpoints to average, {len(chosen)} are there")
        done = [r for r in self.log.records if r.get("averaged")]
        if done and done[-1]["averaged"] == chosen and (self.directory / AVERAGED / str(self.update)).is_dir():
            return dict(done[-1]["validation"])
        shutil.rmtree(self.directory / AVERAGED, ignore_errors=True)  # of others, or without a record
        saved = Checkpoints(self.directory / AVERAGED)
        mean = average([self.checkpoints.restore(self.state, update).params for update in chosen])
        state = self.state._replace(params=like(mean, self.state.params))
        saved.save(state, self.run, self.prepared.tokenizers)
        saved.close()
        return self._report(state, {"averaged": chosen})
