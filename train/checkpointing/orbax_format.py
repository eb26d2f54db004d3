"""Runs and their checkpoints, which orbax writes: the functions of `convert.formats.run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ...backend.errors import CheckpointError, ConfigError, ConversionError
from ...configs.schema import TransformerConfig
from ...convert.arrays.frameworks import to_jax_arrays
from ...convert.checkpoint import FOLDERS, TOKENIZER_FILES, Checkpoint, Training
from ...convert.formats.run import AVERAGED, CONFIG, WEIGHTS
from ...convert.io.atomic_io import new_directory, write_files
from ...convert.io.safetensors_files import read_safetensors, write_safetensors
from ...convert.optimizers.adam import find_adam, put_adam
from ...convert.port import flax_specs
from ...convert.rules import translate
from ...convert.weight_files.reading import read_json
from ...flax_transformer.unused_parameters import without_gradient
from ..step.optimizers import make_optimizer
from ..step.step import TrainState
from .checkpoints import SOURCE, folder_of, read_model, read_run, read_state, source_of
from .state_checksums import CHECKSUMS, checksums_of_arrays, read_checksums, verify_arrays, write_checksums

_MODEL = "model.json"  # replaces the run's config in a checkpoint of weights alone
_COMMITTED = "commit_success.txt"  # of orbax
_UNUSED = "unused.safetensors"  # of a converted Hugging Face directory


def read(path: Path) -> Checkpoint:
    """Read a checkpoint from its own folder or from a run. Raises: CheckpointError if it cannot be read."""
    return _read(path, _read_training)


def read_without_training(path: Path) -> Checkpoint:
    """As `read`, without the training state."""
    return _read(path, _read_without_training)


def _read(path: Path, read_run_checkpoint: Callable[[Path], Checkpoint]) -> Checkpoint:
    folder = folder_of(path)
    try:
        with jax.enable_x64(True):  # without it, JAX would convert float64 to float32
            return _read_weights(folder) if (folder / WEIGHTS).is_dir() else read_run_checkpoint(folder)
    except ConversionError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_config(path: Path) -> TransformerConfig:
    """The config of the model at a path. Raises: CheckpointError, as `read`."""
    folder = folder_of(path)
    return _model_config(folder) if (folder / WEIGHTS).is_dir() else read_run(folder / "run").model


def describe(path: Path) -> str:
    """Whether a path is a run or a checkpoint, and which checkpoint counts."""
    folder = folder_of(path)
    kind = "checkpoint of weights" if (folder / WEIGHTS).is_dir() else "checkpoint of a run"
    if folder == path:
        return kind
    return f"run, {'averaged checkpoint' if folder.parent.name == AVERAGED else 'checkpoint'} {folder.name}"


def protection(path: Path) -> str | None:
    """What the arrays are compared with on reading; None if nothing."""
    return "checksums" if (folder_of(path) / "run" / CHECKSUMS).is_file() else None


def write(checkpoint: Checkpoint, path: Path, layout: str) -> None:
    """Write a checkpoint atomically: a training state, or weights alone. Raises: ConversionError if that fails."""
    with new_directory(path) as folder, jax.enable_x64(True):  # without it, JAX would convert float64 to float32
        (folder / "run").mkdir()
        write_files(folder / "run", checkpoint.files)
        (folder / "run" / SOURCE).write_text(source_of(checkpoint), encoding="utf-8")
        if checkpoint.unused:
            write_safetensors(folder / "run" / _UNUSED, checkpoint.unused, {})
        if checkpoint.training is not None:
            (folder / "run" / CONFIG).write_text(checkpoint.training.run.to_json(), encoding="utf-8")
            tree: Any = _train_state(checkpoint, checkpoint.training)
        else:
            (folder / "run" / _MODEL).write_text(checkpoint.config.to_json() + "\n", encoding="utf-8")
            tree = dict(checkpoint.arrays)
        write_checksums(folder / "run", checksums_of_arrays(tree))
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder / (WEIGHTS if checkpoint.training is None else "state"), tree)
        for file in folder.glob(f"*/{_COMMITTED}"):
            file.write_text("committed\n", encoding="utf-8")  # orbax writes an absolute path


def _read_without_training(folder: Path) -> Checkpoint:
    run, arrays = read_model(folder)
    return Checkpoint(run.model, _to_numpy(arrays), **_other_contents(folder))


def _read_training(folder: Path) -> Checkpoint:
    """A checkpoint with training state; averaged weights have none, because theirs is the last checkpoint's."""
    if folder.parent.name == AVERAGED:
        return _read_without_training(folder)
    run, state = read_state(folder)
    arrays = _to_numpy({**state.buffers, **state.params})
    adam = find_adam(state.optimizer)
    epoch, batch = (int(number) for number in state.position)
    moments = (_to_numpy(arrays) for arrays in (adam.mu, adam.nu))
    count = int(np.asarray(adam.count))
    training = Training(run, int(state.update), int(state.seed), (epoch, batch), count, *moments)
    return Checkpoint(run.model, arrays, **_other_contents(folder), training=training)


def _read_weights(folder: Path) -> Checkpoint:
    config = _model_config(folder)
    try:
        with ocp.PyTreeCheckpointer() as reader:
            arrays = _to_numpy(reader.restore(folder.absolute() / WEIGHTS))
    except Exception as error:  # orbax and tensorstore raise many types
        raise CheckpointError(f"{folder}: cannot be read: {' '.join(str(error).split())[:300]}") from None
    verify_arrays(arrays, folder)
    translate([], arrays, flax_specs(config))  # raises if names or shapes do not match
    return Checkpoint(config, arrays, **_other_contents(folder))


def _other_contents(folder: Path) -> dict[str, Any]:
    """The other contents of a checkpoint: in one of a run, tokenizers and the source of its initial weights."""
    run = folder / "run"
    source = read_json(run / SOURCE) if (run / SOURCE).is_file() else {}
    paths = sorted(path for name in FOLDERS for path in (run / name).glob("*") if path.name in TOKENIZER_FILES)
    return {
        "layout": source.get("layout"),
        "documents": source.get("documents", {}),
        "system": source.get("system"),
        "assumed": _texts(source.get("assumed", []), run / SOURCE),
        "unused": read_safetensors(run / _UNUSED)[0] if (run / _UNUSED).is_file() else {},
        "files": {str(path.relative_to(run)): path.read_bytes() for path in paths if path.is_file()},
    }


def _texts(value: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{path}: assumed must be a list of strings, not {value!r}")
    return tuple(value)


def _model_config(folder: Path) -> TransformerConfig:
    read_checksums(folder / "run")
    try:
        return TransformerConfig.from_dict(read_json(folder / "run" / _MODEL))
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{folder / 'run' / _MODEL}: {' '.join(str(error).split())}") from None


def _train_state(checkpoint: Checkpoint, training: Training) -> TrainState:
    arrays, config = to_jax_arrays(checkpoint.arrays), checkpoint.config
    trained = flax_specs(config, trained_only=True)
    params = {name: a for name, a in arrays.items() if name in trained}
    buffers = {name: a for name, a in arrays.items() if name not in trained}
    initial_state = make_optimizer(training.run.training, without_gradient(config)).init(params)
    optimizer = put_adam(initial_state, training.count, training.exp_avg, training.exp_avg_sq)
    numbers = jnp.asarray(training.update, jnp.int32), jnp.uint32(training.seed)
    return TrainState(params, buffers, optimizer, *numbers, jnp.asarray(training.position, jnp.int32))


def _to_numpy(arrays: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}
