"""The training loop: it reads batches, writes checkpoints and metrics, and resumes bit-exactly after any interruption.

The order within an update is: the step, its record, a checkpoint if one is due, then validation. On resume, the updates
after the last checkpoint are computed again, with the same result.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from ...backend.compilation_cache import use_compilation_cache
from ...backend.errors import CheckpointError, RunError
from ...backend.malloc import keep_freed_memory
from ...backend.self_test import check_compiler
from ...backend.xla_flags import set_xla_flags
from ...configs.run import RunConfig
from ...configs.sharding import ShardingConfig
from ...configs.training import check_trainable
from ...convert.formats.run import AVERAGED, CHECKPOINTS
from ...flax_transformer.model import Transformer
from ..checkpointing.checkpoints import Checkpoints, average, read_processes, read_run
from ..checkpointing.run_directory import locked, prepare_in
from ..data.buckets import describe_shapes
from ..data.dataset import PlannedBatch
from ..data.prepare import PreparedRun
from ..processes.process_group import ProcessGroup
from ..processes.step_summary import Exchange, StepSummary, checksum
from ..step.partitioning import Placement, describe_devices, device_put_like
from ..step.programs import Programs
from ..step.step import Batch, Metrics, TrainState, abstract_state, explain, init_state
from ..step.step_programs import StepPrograms
from ..tracking.metrics import MetricsLog
from ..tracking.plot import PlotTracker
from ..tracking.progress import TrainingProgress
from ..tracking.swanlab_tracker import SwanLabTracker, check_swanlab
from ..tracking.tensorboard_tracker import TensorBoardTracker
from ..tracking.tracker import Tracker
from .divergence import recovery_hint
from .evaluate import Validation
from .run_schedule import RunSchedule
from .signals import StopSignals
from .warm_start import InitialWeights, read_initial_weights


class Outcome(NamedTuple):
    """How a run ended."""

    update: int  # the last one
    validation: dict[str, Any] | None  # the last one; of the averaged parameters if `average` is set
    stopped_by: int | None  # signal; None: the run is finished


def train(
    run: RunConfig,
    directory: Path,
    console: Console | None = None,
    trackers: Sequence[Tracker] = (),
    group: ProcessGroup | None = None,
) -> Outcome:
    """Train in a run directory, or resume there. `trackers` get the metrics in addition to the run's own files.

    `group`: the processes of the run, which `twinax train` starts; None: this process alone.

    Raises:
        DataError, ConfigError, CheckpointError: the corpus, a tokenizer, the config or a checkpoint cannot be used.
        RunError: the directory is in use or belongs to another run; or a loss is not finite: its batch is saved there.
    """
    keep_freed_memory()
    set_xla_flags()
    group = group or ProcessGroup()
    console = console or Console(stderr=True, quiet=not group.is_first)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    check_trainable(run.model)
    run.sharding.sizes(jax.device_count())  # before the corpus is read
    note = check_compiler()
    if run.loop.swanlab is not None:
        check_swanlab(run.loop.swanlab)
    cache_directory = use_compilation_cache()
    with locked(directory, say) if group.is_first else nullcontext():
        # On resume the initial weights are not read: their file may no longer exist.
        is_new = not any((directory / CHECKPOINTS).glob("[0-9]*"))
        group.barrier("run", {"new": is_new, **_comparable(run)})
        say(f"run: {directory}")
        initial_weights = read_initial_weights(run) if is_new else None
        if initial_weights is not None:
            for line in initial_weights.notes:
                say(line)
        prepared, placement = prepare_in(directory, run, initial_weights, say, group)
        if note is not None:
            say(note)
        say(describe_devices([device.device_kind for device in jax.devices()], placement.config, group.count))
        say(describe_shapes(prepared.buckets))
        if is_new and (updates := prepared.run.loop.updates or 0) < (warmup := run.training.warmup_updates):
            say(
                f"warm-up is {warmup:,} updates and the run has {updates:,}: the learning rate never reaches its peak; "
                "to change that, stop this run (Ctrl-C) and start another one with --training.warmup-updates "
                f"{max(updates // 10, 1)} --out {directory}-2"
            )
        say(f"compilation cache: {cache_directory or 'none'}")
        # Importing grain replaces `builtins.__import__` for all threads for a while, and JAX imports while it traces.
        import_module("grain")
        with closing(Programs(in_background=group.count == 1)) as programs:
            return _Loop(prepared, directory, placement, initial_weights, console, say, trackers, group, programs).go()


def _comparable(run: RunConfig) -> dict[str, Any]:
    """What must be equal in all processes. Their corpora may be in different places: the ids are compared instead."""
    devices = sorted(device.device_kind for device in jax.local_devices())
    return {**run.to_dict(), "corpus": None, "float64": jax.config.read("jax_enable_x64"), "devices": devices}


@dataclass
class _Pending:
    """An update whose metrics have not been read: reading them waits for the step."""

    update: int
    batch: PlannedBatch
    metrics: Metrics
    summary: StepSummary


class _Loop:
    """The state of a run in this process, and the order of steps, records, checkpoints and validation."""

    def __init__(
        self,
        prepared: PreparedRun,
        directory: Path,
        placement: Placement,
        initial_weights: InitialWeights | None,
        console: Console,
        say: Callable[[str], None],
        trackers: Sequence[Tracker],
        group: ProcessGroup,
        programs: Programs,
    ):
        self.prepared, self.run = prepared, prepared.run
        self.directory, self.console, self.placement, self.group = directory, console, placement, group
        accumulation = self.run.training.accumulation
        self.rows = [placement.rows(bucket.sentences, accumulation) for bucket in prepared.buckets]
        self.batches = prepared.batches([rows.here for rows in self.rows])
        project = prepared.run.loop.swanlab
        if project is not None and group.is_first:  # before anything slow, because it may fail
            trackers = [SwanLabTracker(project, directory, self.run.to_dict()), *trackers]
        self.step = StepPrograms(programs, prepared, placement, self.rows)
        self.exchange = Exchange(placement, group)
        self.validation = Validation(prepared, placement, group, programs)
        self.checkpoints = Checkpoints(
            directory / CHECKPOINTS, lambda updates: self.schedule.checkpoints_to_keep(updates)
        )
        self.update = 0
        saved_updates = self.checkpoints.updates
        group.barrier("checkpoint", saved_updates[-1:])
        if saved_updates:
            shapes = placement.abstract(abstract_state(self.run.model, self.run.training))
            self.update, self.state = self.checkpoints.restore_newest(shapes, say)
            self._resume_position()
            self._compile_in_advance()
        else:
            self._compile_in_advance()  # while the weights are drawn
            self.state = self._first_state(initial_weights)
        self.log = MetricsLog(directory, self.update, say, writes=group.is_first)
        if group.is_first:
            self.log.add(TensorBoardTracker(directory, self.update), PlotTracker(self.log.records, directory))
            self.log.add(*trackers)
        self.schedule = RunSchedule(self.run.loop, self.log.validations)
        self.stopped_by: int | None = None  # the signal after which all processes stop

    def _first_state(self, initial_weights: InitialWeights | None) -> TrainState:
        if initial_weights is None:
            model = Transformer(self.run.model, rngs=nnx.Rngs(self.run.training.seed))
        else:
            model = initial_weights.model(self.run.model)
        return self.placement.place(init_state(model, self.run.training))

    @property
    def _run_here(self) -> RunConfig:
        """The run with the sizes of this mesh."""
        return replace(self.run, sharding=self.placement.config)

    def _resume_position(self) -> None:
        """Raises: CheckpointError if the saved position does not match the corpus and its batch shapes.

        A checkpoint of another program, which does not know the epochs, counts all batches in epoch 0.
        """
        position = [int(self.state.update), *map(int, self.state.position)]
        if self.prepared.train.is_varying and position[1]:
            self.batches.resume(*position)
        expected = [self.update, *self.batches.position(self.update)]
        if position not in (expected, [self.update, 0, self.update]):
            rename = f"; rename the folder to {position[0]}" if position[0] != self.update else ""
            raise CheckpointError(
                f"{self.checkpoints.directory / str(self.update)}: has update, epoch and batch {position}, but this "
                f"corpus and its batch shapes give {expected}{rename}"
            )

    def _other_mesh(self) -> str:
        """A note if the last checkpoint was written on another mesh, or by another number of processes."""
        folder = self.directory / CHECKPOINTS / str(self.update) / "run"
        mesh = read_run(folder).sharding
        if mesh == ShardingConfig():  # a checkpoint of an earlier version does not say
            return ""
        earlier, now = (mesh, read_processes(folder)), (self.placement.config, self.group.count)
        if earlier == now:
            return ""
        before, here = (f"{mesh} in {count} process{'es' if count > 1 else ''}" for mesh, count in (earlier, now))
        return f", which was on {before}; on {here}, the same losses up to rounding, not bit for bit"

    def go(self) -> Outcome:
        """Train until the end of the run, a signal, or a loss that is not finite."""
        try:
            with (
                TrainingProgress(self.console, self.update, self.schedule.total) as progress,
                StopSignals(progress.say, progress.close) as stop,
            ):
                self.progress, self.stop = progress, stop
                if self.update:
                    progress.say(f"resuming after update {self.update:,}{self._other_mesh()}")
                    self._repeat_validations()
                    self._validate_if_due()  # the process may have been killed between checkpoint and validation
                if self._continues():
                    progress.say(self._describe_compilation())
                    self._updates()
                if self.stopped_by is not None:
                    self._save()
                    self.checkpoints.wait()
                    progress.say(f"stopped and saved after update {self.update:,}; run the same command to resume")
                    return Outcome(self.update, self._last_validation(), self.stopped_by)
                return Outcome(self.update, self._finish(), None)
        finally:
            self.checkpoints.close()
            self.log.close()

    def _continues(self) -> bool:
        if self.group.count == 1:
            self.stopped_by = self.stop.caught
        return self.stopped_by is None and self.schedule.continues(self.update)

    def _describe_compilation(self) -> str:
        """One line on the programs that the first validation needs."""
        shapes = self.validation.shapes
        programs = f"the loss at {shapes} batch shape{'s' if shapes > 1 else ''}"
        translation = " and translation" if self.run.loop.translations else ""
        return f"the first validation needs compiled programs for {programs}{translation}"

    def _updates(self) -> None:
        pending: _Pending | None = None
        stream = self.batches.read(self.update, self.run.batches.workers)
        try:
            for batch in stream:
                metrics = self._step(batch)
                if pending is not None:
                    self._record(pending)
                pending = _Pending(self.update, batch, metrics, self._reduce_step_summary(batch))
                save_due = self.schedule.checkpoint_due(self.update)
                if save_due or not self._continues():
                    self._record(pending)
                    pending = None
                    if save_due:
                        self._save()
                    self._validate_if_due()
                    if not self._continues():
                        return
        finally:
            stream.close()

    def _step(self, planned: PlannedBatch) -> Metrics:
        batch = Batch(*self.placement.put_rows(planned.arrays, self.rows[planned.bucket]))
        if not self.step.is_ready(planned.bucket):
            self._wait_for_programs(planned.bucket)
        self.group.report_progress(f"update {self.update + 1}")
        with self.stop.during("this update"):
            self.state, metrics = self.step(planned.bucket, self.state, batch)
        self.update += 1
        return metrics

    def _compile_in_advance(self) -> None:
        """Begin to compile what this epoch needs, in the order in which it needs it, then what validation needs."""
        epoch, number = self.batches.position(self.update)
        coming = self.batches.plan(epoch).buckets[number:][: self.batches.total - self.update]
        for bucket in dict.fromkeys(coming):
            self.step.add(bucket)
        self.validation.compile_in_advance()

    def _wait_for_programs(self, bucket: int) -> None:
        """Wait until all processes have compiled a batch shape: collectives on a CPU wait for half a minute only."""
        with self.stop.during("this update's compilation"):
            seconds = self.step.compile_seconds(bucket)
        self.group.barrier("the programs are compiled")
        self.progress.compiled(self.prepared.buckets[bucket], seconds, len(self.prepared.buckets))

    def _reduce_step_summary(self, batch: PlannedBatch) -> StepSummary:
        rows = self.rows[batch.bucket]
        own = rows.own
        part = checksum(rows.here[own], batch.arrays.src_tokens[own], batch.arrays.labels[own])
        return self.exchange(StepSummary(self.stop.caught or 0, part))

    def _record(self, pending: _Pending) -> None:
        metrics = pending.metrics
        if (reason := explain(self.state, metrics)) is not None:
            path = self.directory / f"batch-{pending.update}.npz"
            if self.group.is_first:
                np.savez(path, **self.prepared.batches()[pending.update - 1].arrays._asdict())
            way_back = recovery_hint(self.directory, self.run, self.log.records, self.checkpoints.updates)
            raise RunError(
                f"update {pending.update}: {reason.partition(': ')[2]}; its batch is in {path}. Resuming repeats this "
                f"update. {way_back}"
            )
        batch = pending.batch
        loss, rate, tokens = float(metrics.loss), float(metrics.learning_rate), int(metrics.tokens)
        record = {"update": pending.update, "epoch": batch.epoch, "batch": batch.number, "loss": loss, "tokens": tokens}
        record["checksum"] = int(pending.summary.checksum)
        if self.group.count > 1:
            self.stopped_by = int(pending.summary.signal) or None
        self.log.write({**record, "gradient_norm": float(metrics.gradient_norm), "learning_rate": rate})
        self.progress.advance(pending.update, loss, rate, tokens)

    def _save(self) -> None:
        self.group.report_progress(f"the checkpoint of update {self.update}")
        position = jnp.array(self.batches.position(self.update), jnp.int32)
        self.log.flush()
        self.state = self.state._replace(position=device_put_like(position, self.state.position))
        self.checkpoints.save(self.state, self._run_here, self.prepared.tokenizers)

    def _validate_if_due(self) -> None:
        if self.schedule.validation_due(self.update) and self.update not in self.log.validations:
            self._report(self.state, {})

    def _repeat_validations(self) -> None:
        """Repeat validations of earlier checkpoints whose records are damaged, because one may be the best."""
        due = [u for u in self.checkpoints.updates if u < self.update and self.schedule.validation_due(u)]
        for update in due:
            if update in self.log.validations:
                continue
            state = self.checkpoints.restore_or_set_aside(self.state, update, self.progress.say)
            if state is not None:
                self._report(state, {}, update)

    def _report(self, state: TrainState, notes: dict[str, Any], update: int | None = None) -> dict[str, Any]:
        """Validate a state, write the record and print it. `update`: that of the state, by default the current one."""
        update = self.update if update is None else update
        start = time.monotonic()
        self.progress.pause()
        self.group.report_progress(f"the validation of update {update}")
        with self.stop.during("this validation"):
            scores = self.validation.measure({**state.buffers, **state.params})
        self.log.write({"update": update, **notes, "validation": scores})
        label = f"average of {', '.join(map(str, notes['averaged']))}" if notes else f"update {update:,}"
        self.progress.validated(label, scores, time.monotonic() - start)
        return scores

    def _last_validation(self) -> dict[str, Any] | None:
        validations = self.log.validations
        return dict(validations[max(validations)]) if validations else None

    def _finish(self) -> dict[str, Any] | None:
        """Average checkpoints if the run sets `average`, and print where the results are."""
        scores = self._last_validation()
        self.progress.say(self.schedule.describe_end(self.update))
        self.checkpoints.wait()
        if self.run.loop.average > 1:
            scores = self._average(self.run.loop.average)
        self.progress.say(f"everything is in {self.directory}")
        return scores

    def _average(self, number: int) -> dict[str, Any] | None:
        """Validate the mean of the last validated checkpoints and save it in its own directory."""
        updates = [u for u in sorted(self.log.validations)[-number:] if u in self.checkpoints.updates]
        records = [r for r in self.log.records if r.get("averaged")]
        exists = (self.directory / AVERAGED / str(self.update)).is_dir()
        self.group.barrier("average", exists)
        if records and records[-1]["averaged"] == updates and exists:
            return dict(records[-1]["validation"])
        # An average of other checkpoints, or one without a record because the process was killed.
        if self.group.is_first:
            shutil.rmtree(self.directory / AVERAGED, ignore_errors=True)
        self.group.barrier("an earlier average is removed")
        params: dict[int, Any] = {}
        for update in updates:
            if update == self.update:  # in memory: the last one must not be set aside
                params[update] = self.state.params
            elif state := self.checkpoints.restore_or_set_aside(self.state, update, self.progress.say):
                params[update] = state.params
        if len(params) < number:
            self.progress.say(f"average={number}: only {len(params)} validated checkpoints exist; averaging these")
        if not params:
            return self._last_validation()
        state = self.state._replace(params=device_put_like(average([*params.values()]), self.state.params))
        with closing(Checkpoints(self.directory / AVERAGED)) as averaged:
            averaged.save(state, self._run_here, self.prepared.tokenizers)
        return self._report(state, {"averaged": [*params]})
