"""A checkpoint: a config and its arrays, wherever they came from, and what else is kept beside them."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..configs.errors import ConversionError
from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import named_arrays
from .arrays import to_jax_arrays
from .port import to_params, to_state_dict

if TYPE_CHECKING:
    from .. import torch_reference

Arrays = Mapping[str, np.ndarray]

# Files of tokenizers, slow and fast, of the families, by folder: one for both sides, or one each. No other is kept: a
# checkpoint from elsewhere must not say where on the disk something is written.
FOLDERS = ("tokenizer", "source_tokenizer", "target_tokenizer")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "target_vocab.json", "merges.txt"),
    *("source.spm", "target.spm", "sentencepiece.bpe.model", "spiece.model"),
)
_FILES = {f"{folder}/{name}" for folder in FOLDERS for name in TOKENIZER_FILES}
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam, by the names of `torch.optim`
CONFIG, GENERATION = "config.json", "generation_config.json"  # of a Hugging Face directory


@dataclass(frozen=True)
class Training:
    """What a training goes on from, beside the weights; arrays by Flax name."""

    run: RunConfig
    update: int  # updates made
    seed: int  # of dropout
    position: tuple[int, int]  # in the data: epoch, batch
    count: int  # updates that Adam has counted
    exp_avg: Arrays  # its running means of gradients
    exp_avg_sq: Arrays  # and of their squares


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and arrays by Flax name, and what else the file or directory held that has a layout.

    Raises:
        ConversionError: it holds a file or a document that is no checkpoint's.
    """

    config: TransformerConfig
    arrays: Arrays
    layout: str | None = None  # of the Hugging Face directory that it comes from
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # that directory's JSON files by name
    unused: Arrays = field(default_factory=dict)  # its arrays that no computation reads
    files: Mapping[str, bytes] = field(default_factory=dict)  # of tokenizers, by path: tokenizer/tokenizer.json, ...
    training: Training | None = None
    system: str | None = None  # the published system whose file it comes from
    assumed: tuple[str, ...] = ()  # settings of that system that the file does not state, as "num_heads=8"
    skipped: tuple[str, ...] = ()  # entries of its file that were ignored, as "optimizer_state_dict"

    def __post_init__(self) -> None:
        if not isinstance(self.system, str | None) or not all(isinstance(item, str) for item in self.assumed):
            raise ConversionError(f"its system {self.system!r} and what was assumed, {self.assumed!r}, are no texts")
        _check("file", self.files, _FILES, bytes)
        _check("document", self.documents, {CONFIG, GENERATION}, Mapping)

    @classmethod
    def of(cls, model: "Transformer | torch_reference.Transformer") -> "Checkpoint":
        """The checkpoint of a model of either framework; shares no memory with it.

        Raises:
            ConversionError: the model's arrays are not those of its config.
        """
        if isinstance(model, Transformer):
            return cls(model.config, {name: np.array(a) for name, a in named_arrays(model).items()})
        return cls(model.config, to_params(model.state_dict(), model.config))

    def to_flax(self) -> Transformer:
        """The Flax model. Raises: ConversionError where the arrays are float64 and JAX has that switched off."""
        return Transformer.from_arrays(self.config, to_jax_arrays(self.arrays))

    def to_torch(self) -> "torch_reference.Transformer":
        """The PyTorch model. Raises: ConversionError where the arrays are not those of the config."""
        from ..torch_reference.model import Transformer as TorchTransformer

        return TorchTransformer.from_state_dict(self.config, to_state_dict(self.arrays, self.config))

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Every array that it holds, by name: weights, unused ones, the optimiser's."""
        found = {**self.arrays, **{f"unused.{name}": a for name, a in self.unused.items()}}
        if self.training is not None:
            for key in MOMENTS:
                found |= {f"optimizer.{key}.{name}": a for name, a in getattr(self.training, key).items()}
        return found


def _check(what: str, held: Any, known: Collection[str], kind: type) -> None:
    if not isinstance(held, Mapping):
        raise ConversionError(f"its {what}s are {held!r}, not names with a {kind.__name__} each"[:200])
    for name, value in held.items():
        if name not in known:
            raise ConversionError(f"holds the {what} {name!r}, which is none of a checkpoint's"[:200])
        if not isinstance(value, kind):
            raise ConversionError(f"its {what} {name} is no {kind.__name__}")


def checksum(arrays: Arrays) -> str:
    """SHA-256 of arrays by name: of names, dtypes, shapes and bytes, whatever their order and memory layout."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
