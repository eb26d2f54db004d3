"""Checkpoints of a run, written asynchronously and atomically.

A checkpoint is a folder named after its number of updates: `state` (orbax: model, optimizer, update, seed of dropout,
position in the data) and `run` (config.json, tokenizers, checksums.json).
"""

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ...backend.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from ...configs.json_text import parse_json
from ...configs.run import RunConfig
from ...convert.checkpoint import Checkpoint
from ...convert.formats.run import AVERAGED, CHECKPOINTS, CONFIG, is_checkpoint
from ...convert.io.untrusted import check_declared_size
from ...convert.port import flax_specs
from ...flax_transformer.module import on_host
from ..data.tokenizer_pair import Tokenizers
from ..step.partitioning import on_one_device
from ..step.step import TrainState, abstract_state
from ..tracking.metrics import best_update, read_validations
from .state_checksums import (
    check_permissions,
    checksums_of_arrays,
    read_checksums,
    verify_arrays,
    verify_fields,
    write_checksums,
)

SOURCE = "source.json"  # layout and documents of the directory that weights came from
_NOT_DAMAGE = "PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Cannot allocate"  # in messages of tensorstore
_PROCESSES = "processes"  # their number, when a checkpoint was written
DAMAGED = "damaged"  # in a run directory: checkpoints that could not be read
_DELETED = "deleted"  # a checkpoint is moved here before deletion, so that none is listed in part


class _FilesHandler(ocp.CheckpointHandler):
    """Writes an item of a checkpoint by calling a function."""

    def save(self, directory: Any, args: "_Files") -> None:
        if jax.process_index() == 0:
            args.write(Path(directory))

    def restore(self, directory: Any, args: Any = None) -> Path:
        return Path(directory)


@ocp.args.register_with_handler(_FilesHandler, for_save=True, for_restore=True)
@dataclass
class _Files(ocp.args.CheckpointArgs):
    write: Callable[[Path], None]


class _PreservationPolicy:
    """A preservation policy that keeps the checkpoints chosen by a function of their updates."""

    def __init__(self, keep: Callable[[Sequence[int]], set[int]]):
        self._keep = keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        updates = self._keep([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step in updates for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints in a directory. `keep` selects those to keep; the last one is always kept."""

    def __init__(self, directory: Path, keep: Callable[[Sequence[int]], set[int]] = lambda updates: {updates[-1]}):
        self.directory = directory.absolute()
        source = self.directory.parent / SOURCE  # of the run
        self.source = source.read_text(encoding="utf-8") if source.is_file() else None
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_PreservationPolicy(lambda updates: {max(updates), *keep(sorted(updates))}),
                todelete_subdir=_DELETED,
                cleanup_tmp_directories=True,
            ),
            item_names=("state", "run"),
        )

    @property
    def updates(self) -> list[int]:
        """Updates of the existing checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, run: RunConfig, tokenizers: Tokenizers) -> None:
        """Start writing a checkpoint unless it exists; the state may be donated immediately."""
        checksums = checksums_of_arrays(state)  # now, because the state may be donated

        def write(folder: Path) -> None:
            write_run(folder, run, tokenizers)
            (folder / _PROCESSES).write_text(f"{jax.process_count()}\n", encoding="utf-8")
            if self.source is not None:
                (folder / SOURCE).write_text(self.source, encoding="utf-8")
            write_checksums(folder, checksums)

        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=_Files(write))
        self.wait()
        with self._one_line_errors():
            self._manager.save(int(state.update), args=items)  # does nothing if it exists

    def restore(self, like: TrainState, update: int) -> TrainState:
        """The state of a checkpoint, on the devices of `like`. Raises: CheckpointError if it cannot be read."""
        return _restore(self.directory / str(update), like)

    def restore_newest(self, like: TrainState, say: Callable[[str], None]) -> tuple[int, TrainState]:
        """(update, state) of the newest checkpoint that is not damaged; newer ones are moved to `DAMAGED`.

        Raises:
            CheckpointError: none can be read, or the newest is damaged and there are other processes.
        """
        *earlier, newest = self.updates
        while True:
            try:
                return newest, self.restore(like, newest)
            except DamagedCheckpointError as error:
                if not earlier:
                    raise CheckpointError(f"{error}; the run has no earlier checkpoint to resume from") from None
                self._set_aside(newest, error, say)
                say(f"resuming from the checkpoint before it, update {earlier[-1]:,}")
            *earlier, newest = earlier

    def restore_or_set_aside(self, like: TrainState, update: int, say: Callable[[str], None]) -> TrainState | None:
        """The state of a checkpoint; None if it is damaged, and moved to `DAMAGED`. Raises: CheckpointError."""
        try:
            return self.restore(like, update)
        except DamagedCheckpointError as error:
            self._set_aside(update, error, say)
            return None

    def _set_aside(self, update: int, error: DamagedCheckpointError, say: Callable[[str], None]) -> None:
        """Move a damaged checkpoint to `DAMAGED`, and say so.

        Raises:
            CheckpointError: there are other processes, which may have read it; or it cannot be moved.
        """
        folder = self.directory / str(update)
        if jax.process_count() > 1:
            raise CheckpointError(f"{error}; move {folder} away to resume from the checkpoint before it")
        target = self.directory.parent / DAMAGED / str(update)
        for number in count(2):
            if not target.exists():
                break
            target = target.with_name(f"{update}-{number}")
        try:
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)
        except OSError as problem:
            with contextlib.suppress(OSError):
                target.parent.rmdir()  # fails if it has earlier ones
            raise CheckpointError(f"{error}; it cannot be moved to {target}: {problem.strerror}") from None
        self._manager.reload()
        say(f"{error}; it is now in {target}")

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises: CheckpointError if it cannot be."""
        with self._one_line_errors():
            self._manager.wait_until_finished()
        self._remove_deleted()  # not while orbax deletes

    def close(self) -> None:
        """Wait, and end orbax's threads. Raises: CheckpointError if the last checkpoint cannot be written."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # reported above
                self._manager.close()

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise many types
            raise CheckpointError(
                f"{self.directory}: a checkpoint cannot be written: {_reason(error)}; earlier checkpoints are "
                "complete: fix the cause and run the same command to resume"
            ) from None

    def _remove_deleted(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / _DELETED, ignore_errors=True)


def source_of(checkpoint: Checkpoint) -> str:
    """The content of `SOURCE` for a checkpoint: what writing it back into its layout needs."""
    source: dict[str, Any] = {"layout": checkpoint.layout, "system": checkpoint.system, "assumed": checkpoint.assumed}
    source["documents"] = {name: dict(document) for name, document in checkpoint.documents.items()}
    return json.dumps(source, indent=2) + "\n"


def write_run(folder: Path, run: RunConfig, tokenizers: Tokenizers) -> None:
    """Write the config and tokenizers of a run."""
    tokenizers.save(folder)
    (folder / CONFIG).write_text(run.to_json(), encoding="utf-8")


def read_run(folder: Path) -> RunConfig:
    """The config that `write_run` wrote. Raises: CheckpointError if it is missing, damaged or cannot be read."""
    read_checksums(folder)
    try:
        values = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("is not a JSON object")
        if "model_type" in values:
            raise ValueError(
                "is of a Hugging Face directory, not of a run; choose another directory for the run, and pass this one "
                "by --init-from to start from its weights"
            )
        return RunConfig.from_dict(values)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {CONFIG}, so it is neither a run nor a checkpoint of one") from None
    except (ConfigError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {' '.join(str(error).split())}") from None


def read_processes(folder: Path) -> int:
    """The number of processes that wrote a checkpoint; 1 if it does not say."""
    path = folder / _PROCESSES
    return int(path.read_text(encoding="utf-8")) if path.is_file() else 1


class RunCheckpoint(NamedTuple):
    """Config, tokenizers and state of a checkpoint."""

    run: RunConfig
    tokenizers: Tokenizers
    state: TrainState


def read_checkpoint(path: Path) -> RunCheckpoint:
    """Read a checkpoint from its own folder, or the one that `folder_of` chooses in a run.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    folder = folder_of(path)
    read_checksums(folder / "run")
    try:
        tokenizers = Tokenizers.load(folder / "run")
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if tokenizers is None:
        raise CheckpointError(f"{folder / 'run'}: has no tokenizer")
    run, state = read_state(folder)
    return RunCheckpoint(run, tokenizers, state)


def read_state(folder: Path) -> tuple[RunConfig, TrainState]:
    """Config and state from a checkpoint's own folder. Raises: CheckpointError if they cannot be read."""
    run = read_run(folder / "run")
    return run, _restore(folder, _abstract_state(run))


def read_model(folder: Path) -> tuple[RunConfig, dict[str, jax.Array]]:
    """Config and arrays of the model from a checkpoint's own folder, without the optimizer's state.

    Raises:
        CheckpointError: they cannot be read.
    """
    run = read_run(folder / "run")
    check_declared_size(run.model)
    trained = flax_specs(run.model, trained_only=True)
    tree: dict[str, dict[str, Any]] = {"params": {}, "buffers": {}}
    for name, (shape, dtype) in flax_specs(run.model).items():
        tree["params" if name in trained else "buffers"][name] = jax.ShapeDtypeStruct(shape, dtype)
    abstract = on_one_device({part: arrays for part, arrays in tree.items() if arrays})
    arguments = ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
    )
    with _reading(folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(folder.absolute() / "state", args=arguments)
    verify_fields(arrays, folder)
    return run, {name: array for part in arrays.values() for name, array in part.items()}


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint: the path itself, or in a run the averaged one, else the best, else the last.

    An average is ignored if the run has been trained further since.

    Raises:
        CheckpointError: there is no checkpoint; or there are several, and which is the best cannot be read.
    """
    if is_checkpoint(path):
        return path
    averaged, updates = (_numbers(path / name) for name in (AVERAGED, CHECKPOINTS))
    if averaged and averaged[-1] >= max(updates, default=0):
        return path / AVERAGED / str(averaged[-1])
    if not updates and (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: is a run without a checkpoint; to train it, run: twinax train {path}")
    if not updates:
        raise CheckpointError(f"{path}: is neither a checkpoint nor a run with one")
    if len(updates) == 1:
        return path / CHECKPOINTS / str(updates[0])
    try:
        validations = read_validations(path, updates)
    except DataError as error:
        last = path / CHECKPOINTS / str(updates[-1])
        raise CheckpointError(
            f"{error}, so the best checkpoint is not known; to repeat its validation, run: "
            f"{shlex.join(('twinax', 'train', str(path)))}; or name a checkpoint, such as {last}"
        ) from None
    best = best_update(validations, _metric(path, updates))
    return path / CHECKPOINTS / str(updates[-1] if best is None else best)


def _metric(path: Path, updates: Sequence[int]) -> str:
    """The metric of a run, by its config, else by that of the last checkpoint whose config can be read."""
    errors = []
    for folder in (path, *(path / CHECKPOINTS / str(update) / "run" for update in reversed(updates))):
        try:
            return read_run(folder).loop.metric
        except CheckpointError as error:
            errors.append(error)
    raise errors[0]


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if re.fullmatch("[0-9]+", path.name))


def _abstract_state(run: RunConfig) -> TrainState:
    """Shapes and dtypes of a run's state, placed on one device. Raises: ConversionError, as `check_declared_size`."""
    check_declared_size(run.model)
    return on_one_device(abstract_state(run.model, run.training))


def _restore(folder: Path, like: TrainState) -> TrainState:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with _reading(folder), ocp.StandardCheckpointer() as reader:
        state = reader.restore(folder.absolute() / "state", abstract)
    verify_arrays(state, folder)
    return state


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raises: CheckpointError with one line, because orbax and tensorstore raise many types."""
    try:
        yield
    except Exception as error:
        check_permissions(folder)  # without them, orbax finds no checkpoint
        kind = CheckpointError if re.search(_NOT_DAMAGE, _text(error)) else DamagedCheckpointError
        raise kind(f"{folder}: cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The operating system's reason if there is one; tensorstore names all files on the way to it."""
    number = re.search(r"os_error_code='(\d+)'", _text(error))
    return os.strerror(int(number[1])) if number else " ".join(str(error).split())[:300]


def _text(error: BaseException) -> str:
    """The messages of an exception and of its causes: orbax wraps those of tensorstore."""
    return str(error) + (f" {_text(error.__cause__)}" if error.__cause__ is not None else "")


def average(states: Sequence[Mapping[str, Any]]) -> dict[str, jax.Array]:
    """The mean of parameters, computed in float64."""

    def mean(*arrays: Any) -> jax.Array:
        total = reduce(np.add, (on_host(a).astype(np.float64) for a in arrays))
        return jnp.asarray((total / len(arrays)).astype(arrays[0].dtype))

    return {name: mean(*(state[name] for state in states)) for name in states[0]}
