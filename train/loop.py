"""The loop around the step: batches in, checkpoints and metrics out; stopped at any moment, it goes on to the bit.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from ..configs.errors import CheckpointError, RunError
from ..configs.run import RunConfig
from ..configs.training import check_trainable
from ..flax_transformer.model import Transformer
from .buckets import Bucket
from .checkpoints import AVERAGED, CHECKPOINTS, Checkpoints, average
from .compilation_cache import use_compilation_cache
from .dataset import Padded
from .evaluate import Validation
from .freed_memory import keep_freed_memory
from .initial import Initial, read_initial
from .metrics import PLOT, MetricsLog, best_update, plot_losses
from .prepare import Prepared
from .progress import TrainingProgress
from .run_directory import locked, prepare_in
from .signals import StopSignals
from .step import Batch, Metrics, TrainState, explain, init_state, make_train_step
from .swanlab_log import SwanLabLog, check_swanlab

_WIDTH = 120  # characters of a sample that are shown


class Outcome(NamedTuple):
    """How a run ended."""

    update: int  # that it reached
    validation: dict[str, Any] | None  # the last; of averaged parameters where there are some
    stopped_by: int | None  # signal; None: it is finished


def train(run: RunConfig, directory: Path, console: Console | None = None) -> Outcome:
    """Trains, or goes on training, in a run directory.

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
                f"the rate rises for {warmup:,} updates, longer than the run: it never reaches what is asked for; "
                f"with --training.warmup-updates {max(most // 10, 1)} it does"
            )
        say(f"compiled programs are kept in {cache}" if cache else "compiled programs are not kept")
        return _Run(prepared, directory, initial, console).go()


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


class _Run:
    """One process's part of a run."""

    def __init__(self, prepared: Prepared, directory: Path, initial: Initial | None, console: Console):
        self.prepared, self.run, self.directory, self.console = prepared, prepared.run, directory, console
        self.loop, self.batches = prepared.run.loop, prepared.batches()
        assert self.loop.updates is not None
        assert self.loop.validate_every is not None
        self.total, self.validate_every = self.loop.updates, self.loop.validate_every
        project = self.loop.swanlab
        swanlab = None if project is None else SwanLabLog(project, directory, self.run.to_dict())
        self.step = make_train_step(self.run.model, self.run.training)
        self.validation = Validation(prepared)
        self.devices = Mesh(np.array(jax.devices()), ("data",))
        self.state = self._first_state(initial)
        self.checkpoints = Checkpoints(directory / CHECKPOINTS, self._kept)
        self.update = 0
        if found := self.checkpoints.updates:
            self.update = found[-1]
            self.state = self.checkpoints.restore(self.state, self.update)
            self._check_position()
        self.log = MetricsLog(directory, self.update, swanlab)
        self.ready: dict[tuple[int, ...], float] = {}  # seconds until each shape was compiled, or read

    def _first_state(self, initial: Initial | None) -> TrainState:
        if initial is None:
            model = Transformer(self.run.model, rngs=nnx.Rngs(self.run.training.seed))
        else:
            model = initial.model(self.run.model)
        return jax.device_put(init_state(model, self.run.training), NamedSharding(self.devices, PartitionSpec()))

    def _check_position(self) -> None:
        """Raises: CheckpointError where state and shapes do not belong together."""
        expected = [self.update, *divmod(self.update, self.batches.an_epoch)]
        if (found := [int(self.state.update), *map(int, self.state.position)]) != expected:
            raise CheckpointError(
                f"{self.checkpoints.directory / str(self.update)}: is after update, epoch and batch {found}, and "
                f"{expected} belongs to this corpus and its shapes"
            )

    def _kept(self, updates: Sequence[int]) -> set[int]:
        """The last, those to average, and the best."""
        found = self.log.validations
        validated = [u for u in updates if u % self.validate_every == 0 or u == self.total]
        best = best_update({u: v for u, v in found.items() if u in updates}, self.loop.metric)
        return {*updates[-1:], *validated[-self.loop.average :], *([best] if best is not None else [])}

    def go(self) -> Outcome:
        """Trains until the end, a stop or a loss that is not finite."""
        try:
            with (
                TrainingProgress(self.console, self.update, self.total) as progress,
                StopSignals(progress.say, progress.close) as stop,
            ):
                self.progress, self.stop = progress, stop
                if self.update:
                    progress.say(f"going on after update {self.update:,}")
                    self._validate_if_due()  # a kill may have come between the checkpoint and this
                if self._goes_on(stop):
                    progress.say(
                        f"validation compiles {self.validation.shapes} shapes of its own, and what translation needs"
                    )
                    self._updates(stop)
                if stop.caught is not None:
                    self._save()
                    self.checkpoints.wait()
                    progress.say(f"stopped and saved after update {self.update:,}; the same command goes on")
                    return Outcome(self.update, self._last_validation(), stop.caught)
                found = self._finish()
            return Outcome(self.update, found, None)
        finally:
            self.checkpoints.close()
            self.log.close()

    def _goes_on(self, stop: StopSignals) -> bool:
        return stop.caught is None and self.update < self.total and not self._out_of_patience()

    def _updates(self, stop: StopSignals) -> None:
        pending: _Pending | None = None
        stream = self.batches.read(self.update, self.run.batches.workers)
        try:
            for batch in stream:
                metrics = self._step(batch)
                if pending is not None:
                    self._record(pending)
                pending = _Pending(self.update, batch, metrics)
                if self._save_due() or self._validation_due() or stop.caught is not None or self.update == self.total:
                    self._record(pending)
                    pending = None
                    if self._save_due() or self._validation_due():
                        self._save()
                    self._validate_if_due()
                    if not self._goes_on(stop):
                        return
        finally:
            stream.close()

    def _step(self, padded: Padded) -> Metrics:
        batch = self._place(padded)
        shape = (*batch.src_tokens.shape, batch.tgt_tokens.shape[1])
        began, is_new = time.monotonic(), shape not in self.ready
        with self.stop.during("this update's compilation" if is_new else "this update"):
            self.state, metrics = self.step(self.state, batch)
        self.update += 1
        if is_new:
            self.ready[shape] = time.monotonic() - began
            rows, src, tgt = shape
            done, shapes = len(self.ready), len(self.prepared.buckets)
            self.progress.say(f"shape {done} of {shapes}, {rows}×({src}+{tgt}), ready in {self.ready[shape]:.1f} s")
            self.progress.pause(compiling=(shapes - done) * sum(self.ready.values()) / done)
        return metrics

    def _place(self, padded: Padded) -> Batch:
        """The batch on the devices, a part of its rows on each; padded to rows that all parts share evenly."""
        parts = self.devices.size * self.run.training.accumulation
        more = -len(padded.labels) % parts
        pad = self.run.model.pad_id
        arrays = [np.pad(a, ((0, more), (0, 0)), constant_values=pad) for a in padded]
        rows = np.arange(len(arrays[0]), dtype=np.int32)
        return Batch(*jax.device_put((*arrays, rows), NamedSharding(self.devices, PartitionSpec("data"))))

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

    def _save_due(self) -> bool:
        every = self.loop.checkpoint_every
        return bool(every) and self.update % every == 0

    def _validation_due(self) -> bool:
        return self.update % self.validate_every == 0 or self.update == self.total

    def _save(self) -> None:
        epoch, number = divmod(self.update, self.batches.an_epoch)
        self.log.flush()
        position = jax.device_put(jnp.array([epoch, number], jnp.int32), self.state.position.sharding)
        self.state = self.state._replace(position=position)
        self.checkpoints.save(self.state, self.run, self.prepared.tokenizers)

    def _arrays(self, state: TrainState) -> dict[str, Any]:
        return {**state.buffers, **state.params}

    def _validate_if_due(self) -> None:
        if not self._validation_due() or self.update in self.log.validations:
            return
        self._report(self._arrays(self.state), {})
        plot_losses(self.log.records, self.directory / PLOT)

    def _report(self, arrays: dict[str, Any], notes: dict[str, Any]) -> dict[str, Any]:
        """Measures, writes down and prints."""
        began = time.monotonic()
        self.progress.pause()
        with self.stop.during("this validation"):
            found = self.validation.measure(arrays)
        self.log.write({"update": self.update, **notes, "validation": found})
        bleu = f", BLEU {found['bleu']:.2f}" if "bleu" in found else ""
        what = f"average of {', '.join(map(str, notes['averaged']))}" if notes else f"update {self.update:,}"
        self.progress.say(
            f"{what}: validation loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}{bleu} "
            f"({time.monotonic() - began:.1f} s)"
        )
        for src, reference, text in found.get("samples", [])[:2]:
            for line in (f"    {src}", f"    is   {reference}", f"    here {text}"):
                self.progress.say(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")
        return found

    def _out_of_patience(self) -> bool:
        found = self.log.validations
        best = best_update(found, self.loop.metric)
        if self.loop.patience is None or best is None:
            return False
        return sum(update > best for update in found) >= self.loop.patience

    def _last_validation(self) -> dict[str, Any] | None:
        found = self.log.validations
        return dict(found[max(found)]) if found else None

    def _finish(self) -> dict[str, Any] | None:
        """Averages where the run asks for it, and says where everything is."""
        found, best = self._last_validation(), best_update(self.log.validations, self.loop.metric)
        why = ""
        if self.update > self.total:
            why = f": it has more than the {self.total:,} updates that are asked for"
        elif self.update < self.total:
            why = f", {self.loop.patience} validations without a better one"
        self.progress.say(f"finished after update {self.update:,}{why}; best after update {best}")
        self.checkpoints.wait()
        if self.loop.average > 1:
            found = self._average()
        self.progress.say(f"everything is in {self.directory}")
        return found

    def _average(self) -> dict[str, Any] | None:
        """Validates the mean of the last validated checkpoints, and saves it as a checkpoint of its own."""
        last = sorted(self.log.validations)[-self.loop.average :]
        chosen = [u for u in last if u in self.checkpoints.updates]
        if len(chosen) < self.loop.average:
            self.progress.say(f"of {self.loop.average} checkpoints to average, {len(chosen)} are there")
        done = [r for r in self.log.records if r.get("averaged")]
        if done and done[-1]["averaged"] == chosen and (self.directory / AVERAGED / str(self.update)).is_dir():
            return dict(done[-1]["validation"])
        shutil.rmtree(self.directory / AVERAGED, ignore_errors=True)  # of others, or without a record
        saved = Checkpoints(self.directory / AVERAGED)
        mean = average([self.checkpoints.restore(self.state, update).params for update in chosen])
        place = {name: a.sharding for name, a in self.state.params.items()}
        state = self.state._replace(params=jax.device_put(mean, place))
        saved.save(state, self.run, self.prepared.tokenizers)
        saved.close()
        return self._report(self._arrays(state), {"averaged": chosen})
