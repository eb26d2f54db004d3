"""Weights to start from: those of any checkpoint that can be read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..configs.data import TokenizerConfig
from ..configs.errors import CheckpointError
from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from ..convert.file_layouts import describe_assumed
from ..convert.formats import load, load_config
from ..convert.port import flax_specs
from ..flax_transformer.model import Transformer
from .checkpointing.checkpoints import CONFIG, folder_of, is_run_or_checkpoint, read_run
from .data.prepare import FROM_TOKENIZERS, Tokenizers
from .data.tokenization import FILE


@dataclass(frozen=True)
class Initial:
    """A trained model and its tokenizers, where they come with it."""

    config: TransformerConfig
    arrays: Mapping[str, Any]
    tokenizers: Tokenizers | None
    assumed: str | None = None  # what was assumed of a published system's file, in a line

    def check(self, model: TransformerConfig) -> None:
        """Raises: CheckpointError where the arrays are not those of a model, whose vocabularies are theirs."""
        fitted = model.replace(**{name: getattr(self.config, name) for name in FROM_TOKENIZERS})
        needed = {name: spec.shape for name, spec in flax_specs(fitted).items()}
        given = {name: tuple(array.shape) for name, array in self.arrays.items()}
        if wrong := [name for name in sorted({*needed, *given}) if needed.get(name) != given.get(name)]:
            raise CheckpointError(
                f"init_from: {len(wrong)} arrays do not fit the model, as {wrong[0]}: it is "
                f"{given.get(wrong[0], 'missing')} and should be {needed.get(wrong[0], 'absent')}; leave the sizes of "
                "the model as they were"
            )

    def model(self, config: TransformerConfig) -> Transformer:
        """The model with these weights, in the dtype that `config` has."""
        return Transformer.from_arrays(
            config, {name: jnp.asarray(array, config.param_dtype) for name, array in self.arrays.items()}
        )


def read_initial(run: RunConfig) -> Initial | None:
    """What `init_from` names, or None where it names nothing.

    Raises:
        CheckpointError, ConversionError: there is none, it cannot be read, or it does not fit the run's model.
        DataError: its tokenizer cannot be used.
    """
    if run.init_from is None:
        return None
    found = _read(Path(run.init_from), run)
    found.check(run.model)
    return found


def _read(path: Path, run: RunConfig) -> Initial:
    checkpoint = load(_existing(path))
    tokenizers = Tokenizers.of_files(checkpoint.files, run.tokenizer, str(path))
    if tokenizers is None and not run.tokenizer.load:
        raise CheckpointError(f"{path}: has no {FILE}; name its tokenizer by the setting load of tokenizer")
    assumed = describe_assumed(str(path), checkpoint) if checkpoint.assumed else None
    return Initial(checkpoint.config, checkpoint.arrays, tokenizers, assumed)


def settings_of(path: Path) -> tuple[TransformerConfig, TokenizerConfig]:
    """What describes weights to start from: their model, and their tokenizers where these are ours.

    Raises:
        CheckpointError, ConversionError: there are none.
    """
    if is_run_or_checkpoint(path) and (folder_of(path) / "run" / CONFIG).is_file():
        run = read_run(folder_of(path) / "run")
        return run.model, run.tokenizer
    return load_config(_existing(path)), TokenizerConfig()


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory to start from")
    return path
