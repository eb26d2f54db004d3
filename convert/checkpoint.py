"""A checkpoint: a config and its arrays, wherever they came from, and what else is kept beside them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..configs.run import RunConfig
from ..configs.schema import TransformerConfig
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import named_arrays
from .arrays import to_jax_arrays
from .port import to_params, to_state_dict

if TYPE_CHECKING:
    from .. import torch_reference

Arrays = Mapping[str, np.ndarray]


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
    """A model's config and arrays by Flax name, and what else the file or directory held that has a layout."""

    config: TransformerConfig
    arrays: Arrays
    layout: str | None = None  # of the Hugging Face directory that it comes from
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # that directory's JSON files by name
    unused: Arrays = field(default_factory=dict)  # its arrays that no computation reads
    files: Mapping[str, bytes] = field(default_factory=dict)  # of tokenizers, by path: tokenizer/tokenizer.json, ...
    training: Training | None = None

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
            for key in ("exp_avg", "exp_avg_sq"):
                found |= {f"optimizer.{key}.{name}": a for name, a in getattr(self.training, key).items()}
        return found


def checksum(arrays: Arrays) -> str:
    """SHA-256 of arrays by name: of names, number types, shapes and bytes, whatever their order and memory layout."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
