"""Initial weights of a run from any checkpoint that twinax can read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...backend.errors import CheckpointError
from ...configs.data import TokenizerConfig
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...convert.formats.file_layouts import describe_assumed
from ...convert.formats.marian import LAYOUT as MARIAN
from ...convert.formats.registry import describe_verification, load, load_config
from ...convert.formats.run import CONFIG, is_run_or_checkpoint
from ...convert.load_warnings import describe_not_finite
from ...convert.port import flax_specs
from ...convert.weight_files.wrappers import describe_stripped
from ...flax_transformer.model import Transformer
from ..checkpointing.checkpoints import folder_of, read_run, source_of
from ..data.fitting import FROM_TOKENIZERS
from ..data.tokenizer_pair import Tokenizers
from ..text.tokenizer_files import needed_files


@dataclass(frozen=True)
class InitialWeights:
    """A trained model, and its tokenizers if the checkpoint has them."""

    config: TransformerConfig
    arrays: Mapping[str, Any]
    tokenizers: Tokenizers | None
    source: str | None = None  # layout and documents of their directory, which the run's checkpoints keep
    notes: tuple[str, ...] = ()  # one line each: what was assumed, was not verified, or will not be possible

    def check(self, model: TransformerConfig) -> None:
        """Raises: CheckpointError if the arrays do not fit the model, vocabulary sizes aside."""
        fitted = model.replace(**{name: getattr(self.config, name) for name in FROM_TOKENIZERS})
        expected_shapes = {name: spec.shape for name, spec in flax_specs(fitted).items()}
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        if mismatches := [
            name for name in sorted({*expected_shapes, *shapes}) if expected_shapes.get(name) != shapes.get(name)
        ]:
            raise CheckpointError(
                f"init_from: {len(mismatches)} arrays do not fit the model; {mismatches[0]} is "
                f"{shapes.get(mismatches[0], 'missing')} but should be {expected_shapes.get(mismatches[0], 'absent')}: "
                "do not change the model's sizes"
            )

    def model(self, config: TransformerConfig) -> Transformer:
        """The model with these weights in the dtype of `config`."""
        return Transformer.from_arrays(
            config, {name: jnp.asarray(array, config.param_dtype) for name, array in self.arrays.items()}
        )


def read_initial_weights(run: RunConfig) -> InitialWeights | None:
    """The weights that `init_from` names, or None if it is not set.

    Raises:
        CheckpointError, ConversionError: the checkpoint is missing, cannot be read, or does not fit the run's model.
        DataError: its tokenizer cannot be used.
    """
    if run.init_from is None:
        return None
    weights = _read_weights(Path(run.init_from), run)
    weights.check(run.model)
    return weights


def _read_weights(path: Path, run: RunConfig) -> InitialWeights:
    checkpoint = load(_existing(path), adapter=run.adapter, weights_only=True)
    limit = _marian_limit(checkpoint.config, run, path) if checkpoint.layout == MARIAN else None
    tokenizers = Tokenizers.of_checkpoint(checkpoint, run.tokenizer, str(path))
    if tokenizers is None and not run.tokenizer.load:
        needed = needed_files(checkpoint.documents.get(CONFIG, {}))
        raise CheckpointError(f"{path}: has no tokenizer (it needs {needed}); pass one by --tokenizer.load")
    if nan := [name for name, array in checkpoint.arrays.items() if np.isnan(array).any()]:
        raise CheckpointError(f"{path}: {len(nan)} arrays hold NaN, first {nan[0]}; nothing can be trained from them")
    notes = [describe_assumed(str(path), checkpoint) if checkpoint.assumed else None, limit]
    notes += [describe_stripped(str(path), checkpoint)] if checkpoint.stripped else []
    verification = describe_verification(path)
    notes += [f"{path}: {verification}"] if verification.startswith("not ") else []
    notes += [f"{path}: {warning}" for warning in [describe_not_finite(checkpoint.arrays)] if warning]
    source = source_of(checkpoint) if checkpoint.documents else None
    return InitialWeights(checkpoint.config, checkpoint.arrays, tokenizers, source, tuple(filter(None, notes)))


def _marian_limit(model: TransformerConfig, run: RunConfig, path: Path) -> str | None:
    """Why the trained model has no `.npz`. Raises: CheckpointError if the run's settings are the reason."""
    smoothing, decay = run.training.label_smoothing, run.training.weight_decay
    smooths_padding = smoothing and run.training.smoothing != "others_but_padding"
    causes = (
        (smooths_padding, f"label_smoothing={smoothing}", "smoothing others_but_padding"),
        (decay and run.training.decayed == "all", f"weight_decay={decay}", "decayed matrices"),
    )
    for trains_padding, setting, remedy in causes:
        if trains_padding:
            raise CheckpointError(
                f"{path}: {setting} would train padding, which a Marian model does not have; set --training.{remedy}"
            )
    if model.positions == "learned":
        return (
            f"{path}: source and target will have their own trained positions, but a Marian .npz has one table (Wpos): "
            "the trained model cannot be written as .npz"
        )
    return None


def settings_of(path: Path, adapter: str | None = None) -> tuple[TransformerConfig, TokenizerConfig]:
    """The model config of initial weights, and the tokenizer config if twinax trained them.

    Raises:
        CheckpointError, ConversionError: there is no checkpoint, or it cannot be read.
    """
    if adapter is None and is_run_or_checkpoint(path) and (folder_of(path) / "run" / CONFIG).is_file():
        run = read_run(folder_of(path) / "run")
        tokenizer = run.tokenizer
        if tokenizer.load:  # the run has saved it: its file may have moved or changed
            tokenizer = replace(tokenizer, load=(), joint=len(tokenizer.load) == 1)
        return run.model, tokenizer
    return load_config(_existing(path), adapter=adapter), TokenizerConfig()


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory for the initial weights")
    return path
