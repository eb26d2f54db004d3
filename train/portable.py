"""Checkpoints of every form as one thing: our runs and checkpoints, which orbax writes, and what `convert` knows."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from .. import convert
from ..configs.schema import TransformerConfig
from ..configs.validation import ConfigError
from ..convert import Checkpoint
from ..convert.arrays import to_jax_arrays
from ..convert.checkpoint import Training
from ..convert.file_layouts import FILE_LAYOUTS
from ..convert.new_files import new_directory, write_files
from ..convert.optimizer import find_adam, put_adam
from ..convert.port import flax_specs
from ..convert.single_file import SUFFIXES
from ..flax_transformer.reach import without_gradient
from .checkpoints import CONFIG, WEIGHTS, CheckpointError, folder_of, is_run_or_checkpoint, read_run, read_state
from .optimizers import make_optimizer
from .step import TrainState

_MODEL, _SOURCE = "model.json", "source.json"  # of a checkpoint of weights alone, where a run has its config


def read(path: Path, config: TransformerConfig | None = None) -> Checkpoint:
    """The checkpoint at a path: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file.

    `config` is that of a file which has none.

    Raises:
        CheckpointError, ConversionError: there is no checkpoint, or it cannot be read.
    """
    if config is not None and path.is_dir():
        raise convert.ConversionError(f"{path}: has a config of its own; leave the other one away")
    if path.is_dir() and not is_run_or_checkpoint(path) and not (path / CONFIG).is_file():
        within = next((p for p in sorted(path.iterdir()) if is_run_or_checkpoint(p)), None)
        hint = f"; there is a run in {within}" if within else ""
        raise CheckpointError(f"{path}: is neither a run, nor a checkpoint, nor a Hugging Face directory{hint}")
    if not is_run_or_checkpoint(path):
        return convert.load(path, config)
    folder = folder_of(path)
    return _read_weights(folder) if (folder / WEIGHTS).is_dir() else _read_training(folder)


def read_config(path: Path) -> TransformerConfig:
    """The config of a checkpoint. Raises: CheckpointError, ConversionError, as `read`."""
    if is_run_or_checkpoint(path):
        folder = folder_of(path)
        return _model_config(folder) if (folder / WEIGHTS).is_dir() else read_run(folder / "run").model
    return read(path).config


def form_of(path: Path) -> str:
    """What stands at a path that `read` reads, in words."""
    if is_run_or_checkpoint(path):
        folder = folder_of(path)
        kind = "checkpoint of weights" if (folder / WEIGHTS).is_dir() else "checkpoint of a training"
        return kind if folder == path else f"run, of which {folder.relative_to(path)}"
    if path.is_dir():
        return "Hugging Face directory"
    return "safetensors file" if path.suffix == ".safetensors" else "PyTorch file"


def write(checkpoint: Checkpoint, path: Path, layout: str = "twinax") -> None:
    """Writes what `read` reads: where the layout is ours and the path is no file's, a checkpoint as a run has them.

    Raises:
        ConversionError: the layout has no such model, something is there already, or the disk refuses.
    """
    if layout not in FILE_LAYOUTS or path.suffix in SUFFIXES:
        convert.save(checkpoint, path, layout=layout)
        return
    if layout != "twinax" or path.suffix[1:].isalpha():
        what = f"a file of layout {layout}" if layout != "twinax" else "a file, and a directory's name has no ending,"
        raise convert.ConversionError(f"{path}: {what} needs a name that ends in {', '.join(SUFFIXES)}")
    with new_directory(path) as folder:
        (folder / "run").mkdir()
        write_files(folder / "run", checkpoint.files)
        if checkpoint.training is not None:
            (folder / "run" / CONFIG).write_text(checkpoint.training.run.to_json(), encoding="utf-8")
            _save(folder / "state", _train_state(checkpoint, checkpoint.training))
        else:
            source = {"layout": checkpoint.layout, "documents": {n: dict(d) for n, d in checkpoint.documents.items()}}
            (folder / "run" / _MODEL).write_text(checkpoint.config.to_json() + "\n", encoding="utf-8")
            (folder / "run" / _SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
            _save(folder / WEIGHTS, {"arrays": dict(checkpoint.arrays), "unused": dict(checkpoint.unused)})


def _save(folder: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder, tree)


def _read_training(folder: Path) -> Checkpoint:
    run, state = read_state(folder)
    adam = find_adam(state.optimizer)
    epoch, batch = (int(number) for number in state.position)
    moments = (_to_numpy(arrays) for arrays in (adam.mu, adam.nu))
    training = Training(run, int(state.update), int(state.seed), (epoch, batch), int(np.asarray(adam.count)), *moments)
    arrays = _to_numpy({**state.buffers, **state.params})
    return Checkpoint(run.model, arrays, files=_tokenizer_files(folder), training=training)


def _read_weights(folder: Path) -> Checkpoint:
    config = _model_config(folder)
    try:
        source = json.loads((folder / "run" / _SOURCE).read_text(encoding="utf-8"))
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.restore(folder.absolute() / WEIGHTS)
        arrays, unused = _to_numpy(tree["arrays"]), _to_numpy(tree.get("unused") or {})
        kept = source["layout"], source["documents"], unused
    except Exception as error:  # orbax and tensorstore raise what they like
        raise CheckpointError(f"{folder}: cannot be read: {' '.join(str(error).split())[:300]}") from None
    return Checkpoint(config, arrays, *kept, _tokenizer_files(folder))


def _model_config(folder: Path) -> TransformerConfig:
    try:
        return TransformerConfig.from_json((folder / "run" / _MODEL).read_text(encoding="utf-8"))
    except (OSError, ConfigError) as error:
        raise CheckpointError(f"{folder / 'run' / _MODEL}: {' '.join(str(error).split())}") from None


def _tokenizer_files(folder: Path) -> dict[str, bytes]:
    paths = sorted((folder / "run").glob("*tokenizer/*"))
    return {str(path.relative_to(folder / "run")): path.read_bytes() for path in paths if path.is_file()}


def _train_state(checkpoint: Checkpoint, training: Training) -> TrainState:
    arrays, config = to_jax_arrays(checkpoint.arrays), checkpoint.config
    trained = flax_specs(config, trained_only=True)
    params = {name: a for name, a in arrays.items() if name in trained}
    buffers = {name: a for name, a in arrays.items() if name not in trained}
    fresh = make_optimizer(training.run.training, without_gradient(config)).init(params)
    optimizer = put_adam(fresh, training.count, training.exp_avg, training.exp_avg_sq)
    numbers = jnp.asarray(training.update, jnp.int32), jnp.uint32(training.seed), jnp.asarray(training.position)
    return TrainState(params, buffers, optimizer, *numbers)


def _to_numpy(arrays: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}
