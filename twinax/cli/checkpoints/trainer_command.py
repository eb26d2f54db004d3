"""`twinax convert` of trainings that other programs save: the run that resumes them, and what was read back."""

from dataclasses import replace
from pathlib import Path

from ... import convert
from ...backend.errors import ConfigError
from ...configs.run import RunConfig
from ...convert import Checkpoint
from ...convert.formats.run import CONFIG
from ...convert.optimizers.trainer import has_state, training_arguments
from ...convert.weight_files.reading import read_json
from ...train.checkpointing.checkpoints import read_run
from ..usage import UsageError


def run_config(path: str) -> RunConfig:
    """The config of a run: of its directory, of a checkpoint, or a JSON file that `--print-config` printed.

    Raises:
        CheckpointError, UsageError: there is none, or it cannot be read.
    """
    folder = Path(path)
    if folder.is_dir():
        return read_run(folder if (folder / CONFIG).is_file() else folder / "run")
    if not folder.is_file():
        raise UsageError(f"--run {path}: there is no such run or file")
    try:
        return RunConfig.from_dict(read_json(folder))
    except (ConfigError, TypeError) as error:
        raise UsageError(f"--run {path}: {' '.join(str(error).split())}") from None


def read_back(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint at a path that was written from `checkpoint`.

    A directory for `transformers`' Trainer does not store the position in the data, which is that of `checkpoint`.
    """
    if checkpoint.training is None or not has_state(path):
        return convert.load(path, memory_map=True)
    result = convert.load(path, run=checkpoint.training.run, memory_map=True)
    assert result.training is not None
    position, seed = checkpoint.training.position, checkpoint.training.seed
    return replace(result, training=replace(result.training, position=position, seed=seed))


def describe_arguments(run: RunConfig) -> str:
    """The arguments with which Trainer makes the run's updates, as Python code."""
    return ", ".join(f"{name}={value!r}" for name, value in training_arguments(run).items())
