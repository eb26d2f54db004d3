"""The directories that Flax classes of `transformers` 4.55.4 saved (`make legacy-flax`), compared with both twins."""

import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.numpy import load_file

from twinax import convert
from twinax.convert.checkpoint import Checkpoint
from twinax.convert.weight_files.reading import WEIGHTS
from twinax.parity.oracles.transformers import load_model, with_float64_norms

FOLDER = Path(__file__).parent / "legacy_flax"
MODELS = tuple(sorted(path.name for path in FOLDER.iterdir()))


class Outputs(NamedTuple):
    """The content of outputs.npz: token ids, logits of the Flax class, and names and sums of the PyTorch tensors."""

    src: np.ndarray
    tgt: np.ndarray
    float32: np.ndarray
    float64: np.ndarray
    names: np.ndarray
    sums: np.ndarray

    @classmethod
    def of(cls, name: str) -> "Outputs":
        """The outputs beside a model."""
        return cls(**np.load(FOLDER / name / "outputs.npz"))


class Row(NamedTuple):
    """Largest float64 differences from the Flax class, their tolerance, and the tensors that differ after writing."""

    name: str
    errors: dict[str, float]
    tolerance: float
    changes: list[str]

    @property
    def ok(self) -> bool:
        """Whether every difference is within the tolerance and no tensor differs."""
        return not self.changes and all(error <= self.tolerance for error in self.errors.values())


def measure(name: str, folder: Path) -> Row:
    """The row of a model: both twins and the model of the installed `transformers`; it is written into a folder."""
    outputs, checkpoint = Outputs.of(name), convert.load(FOLDER / name)
    logits = twin_logits(checkpoint, outputs.src, outputs.tgt, "float64")
    logits["transformers"] = transformers_logits(FOLDER / name, checkpoint, outputs.src, outputs.tgt)
    errors = {framework: float(np.abs(values - outputs.float64).max()) for framework, values in logits.items()}
    tolerance = 1e-12 * max(1, np.abs(outputs.float64).max())
    return Row(name, errors, tolerance, different_tensors(checkpoint, outputs, folder / name))


def twin_logits(checkpoint: Checkpoint, src: np.ndarray, tgt: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """The logits of both twins in a dtype, by framework."""
    config = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype)
    twin = Checkpoint(config, {name: array.astype(dtype) for name, array in checkpoint.arrays.items()})
    with jax.enable_x64(True):
        flax_logits = twin.to_flax()(jnp.asarray(src), jnp.asarray(tgt))
    with torch.no_grad():
        torch_logits = twin.to_torch().eval()(torch.from_numpy(src), torch.from_numpy(tgt))
    return {"Flax": np.asarray(flax_logits), "PyTorch": torch_logits.numpy()}


def transformers_logits(directory: Path, checkpoint: Checkpoint, src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
    """The logits of the installed `transformers` in float64, with the weights that twinax converted."""
    model = with_float64_norms(load_model(directory, checkpoint).double())
    keep = torch.from_numpy(src != checkpoint.config.pad_id).long()
    inputs = {"input_ids": torch.from_numpy(src).long(), "decoder_input_ids": torch.from_numpy(tgt).long()}
    with torch.no_grad():
        return model(**inputs, attention_mask=keep, use_cache=False).logits.numpy()


def different_tensors(checkpoint: Checkpoint, outputs: Outputs, folder: Path) -> list[str]:
    """The tensors of the written directory whose bytes are not those that `transformers` itself converted."""
    assert checkpoint.layout is not None
    convert.save(checkpoint, folder, layout=checkpoint.layout)
    sums = dict(zip(outputs.names.tolist(), outputs.sums.tolist(), strict=True))
    tensors = load_file(folder / WEIGHTS)
    return [name for name, tensor in tensors.items() if zlib.crc32(tensor.tobytes()) != sums.get(name)]
