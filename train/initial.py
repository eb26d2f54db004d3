"""Weights to start from: those of a run or checkpoint of ours, or of a Hugging Face directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from ..flax_transformer.model import Transformer
from .checkpoints import CheckpointError, is_run_or_checkpoint, read_checkpoint, read_run_of
from .prepare import Tokenizers
from .pretrained import load_tokenizer
from .tokenization import FILE


@dataclass(frozen=True)
class Initial:
    """A trained model and its tokenizers, where they come with it."""

    config: TransformerConfig
    arrays: Mapping[str, Any]
    tokenizers: Tokenizers | None

    def model(self, config: TransformerConfig) -> Transformer:
        """The model with these weights. Raises: CheckpointError where they are not those of `config`."""
        try:
            return Transformer.from_arrays(config, self.arrays)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"init_from: {' '.join(str(error).split())}") from None


def read_initial(run: RunConfig) -> Initial | None:
    """What `init_from` names, or None where it names nothing. Raises: CheckpointError, DataError, ConfigError."""
    if run.init_from is None:
        return None
    path = Path(run.init_from)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such directory to start from")
    if is_run_or_checkpoint(path):
        saved = read_checkpoint(path)
        return Initial(saved.run.model, {**saved.state.buffers, **saved.state.params}, saved.tokenizers)
    checkpoint = _hugging_face(path)
    found = load_tokenizer(str(path), run.tokenizer) if (path / FILE).is_file() else None
    if found is None and not run.tokenizer.load:
        raise CheckpointError(f"{path}: has no {FILE}; name its tokenizer by the setting load of tokenizer")
    return Initial(checkpoint.config, checkpoint.arrays, found and Tokenizers(found, found))


def config_of(path: Path) -> TransformerConfig:
    """The config of weights to start from. Raises: CheckpointError where there are none."""
    if is_run_or_checkpoint(path):
        return read_run_of(path).model
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such directory to start from")
    return _hugging_face(path).config


def _hugging_face(path: Path) -> Any:
    convert = import_module("twinax.convert")  # not above: some layouts need PyTorch
    try:
        return convert.load(path)
    except convert.ConversionError as error:
        raise CheckpointError(str(error)) from None
