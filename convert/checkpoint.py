"""A checkpoint in memory: a config, its arrays and their metadata, independent of the storage format."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend.errors import ConversionError
from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import named_arrays
from .arrays.frameworks import to_jax_arrays
from .arrays.lazy import LazyArrays, contiguous_bytes, lazy
from .port import to_params, to_state_dict

if TYPE_CHECKING:
    from .. import torch_reference

Arrays = Mapping[str, np.ndarray]

# Tokenizer files of the families, slow and fast, by folder: one for both sides, or one per side. Other names are
# rejected, because an untrusted checkpoint must not choose paths that are written to.
FOLDERS = ("tokenizer", "source_tokenizer", "target_tokenizer")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "target_vocab.json", "merges.txt", "dict.txt"),
    *("source.spm", "target.spm", "sentencepiece.bpe.model", "spiece.model"),
)
_FILES = {f"{folder}/{name}" for folder in FOLDERS for name in TOKENIZER_FILES}
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam, by the names of `torch.optim`
CONFIG, GENERATION = "config.json", "generation_config.json"  # of a Hugging Face directory
ARGS = "args.json"  # the settings of a fairseq checkpoint
MARIAN_OPTIONS = "model.yml"  # the options of a Marian model
_DOCUMENTS = (CONFIG, GENERATION, ARGS, MARIAN_OPTIONS)


@dataclass(frozen=True)
class Training:
    """The state that a training resumes from, besides the weights; arrays by Flax name."""

    run: RunConfig
    update: int  # number of finished updates
    seed: int  # seed of dropout
    position: tuple[int, int]  # position in the data: epoch, batch
    count: int  # Adam's step count
    exp_avg: Arrays  # Adam's running means of gradients
    exp_avg_sq: Arrays  # Adam's running means of squared gradients


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and arrays by Flax name, with metadata of the file or directory that they were read from.

    Raises:
        ConversionError: a file or a document has a name that no checkpoint uses.
    """

    config: TransformerConfig
    arrays: Arrays
    layout: str | None = None  # layout of the Hugging Face directory or other toolkit's file it was read from
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # its settings, as JSON files by name
    unused: Arrays = field(default_factory=dict)  # arrays that the model does not use
    files: Mapping[str, bytes] = field(default_factory=dict)  # tokenizer files by path: tokenizer/tokenizer.json, ...
    training: Training | None = None
    system: str | None = None  # published system whose file it was read from
    assumed: tuple[str, ...] = ()  # settings of that system that the file does not state, such as "num_heads=8"
    skipped: tuple[str, ...] = ()  # entries of the file that were ignored, such as "optimizer_state_dict"
    stripped: tuple[str, ...] = ()  # parts of the arrays' names that were removed, such as "module."
    optimizer_notes: tuple[str, ...] = ()  # what was assumed about an optimizer that another program saved

    def __post_init__(self) -> None:
        if not isinstance(self.system, str | None) or not all(isinstance(item, str) for item in self.assumed):
            raise ConversionError(f"system={self.system!r}, assumed={self.assumed!r}: must be strings")
        _check("file", self.files, _FILES, bytes)
        _check("document", self.documents, _DOCUMENTS, Mapping)

    @classmethod
    def of(cls, model: "Transformer | torch_reference.Transformer") -> "Checkpoint":
        """The checkpoint of a model of either framework; shares no memory with the model.

        Raises:
            ConversionError: the model's arrays are not those of its config.
        """
        if isinstance(model, Transformer):
            return cls(model.config, {name: np.array(a) for name, a in named_arrays(model).items()})
        return cls(model.config, to_params(model.state_dict(), model.config))

    def to_flax(self) -> Transformer:
        """The Flax model. Raises: ConversionError if the arrays are float64, which is disabled in JAX."""
        return Transformer.from_arrays(self.config, to_jax_arrays(self.arrays))

    def to_torch(self) -> "torch_reference.Transformer":
        """The PyTorch model. Raises: ConversionError if the arrays are not those of the config."""
        from ..torch_reference.model import Transformer as TorchTransformer

        return TorchTransformer.from_state_dict(self.config, to_state_dict(self.arrays, self.config))

    @property
    def tensors(self) -> LazyArrays:
        """All arrays by name: weights, unused arrays and the optimizer's moments."""
        tensors = lazy(self.arrays) | lazy(self.unused).with_prefix("unused.")
        for key in MOMENTS if self.training is not None else ():
            tensors |= lazy(getattr(self.training, key)).with_prefix(f"optimizer.{key}.")
        return tensors

    def copy(self) -> "Checkpoint":
        """The same with arrays of its own, where these are views of a file or not computed yet."""
        training = self.training
        if training is not None:
            training = replace(training, **{key: _copies(getattr(training, key)) for key in MOMENTS})
        return replace(self, arrays=_copies(self.arrays), unused=_copies(self.unused), training=training)


def _check(item: str, entries: Any, names: Collection[str], kind: type) -> None:
    if not isinstance(entries, Mapping):
        raise ConversionError(f"its {item}s are {entries!r}, not a mapping from names to {kind.__name__}"[:200])
    for name, value in entries.items():
        if name not in names:
            raise ConversionError(f"holds the {item} {name!r}, which no checkpoint uses"[:200])
        if not isinstance(value, kind):
            raise ConversionError(f"its {item} {name} is not a {kind.__name__}")


def _copies(arrays: Arrays) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in arrays.items()}


def checksum(arrays: Arrays) -> str:
    """SHA-256 of arrays by name: of names, dtypes, shapes and values, independent of order and memory layout."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        add_to_checksum(digest, name, arrays[name])
    return digest.hexdigest()


def add_to_checksum(digest: "hashlib._Hash", name: str, array: np.ndarray) -> None:
    """Add an array to the digest of `checksum`, in the order of names."""
    digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
    digest.update(contiguous_bytes(array))
