"""Conversion of a checkpoint's weights to another floating-point dtype, and what that does to the logits."""

from dataclasses import dataclass, replace

import numpy as np

from ..configs.schema import TransformerConfig
from .arrays import cast
from .checkpoint import Checkpoint
from .hugging_face import LAYOUTS, family
from .lazy_arrays import lazy

DTYPES = ("bfloat16", "float16", "float32")
_SENTENCES, _LENGTH = 8, 16  # of the random tokens


def to_dtype(checkpoint: Checkpoint, dtype: str, layout: str) -> Checkpoint:
    """The checkpoint with weights of another dtype, without optimizer, to be written in a layout.

    Numbers are rounded to nearest, ties to even. In float16, arrays that the layout's family keeps in float32 stay so.

    Raises:
        ConversionError: on reading an array, a number is beyond the range of the dtype.
    """
    config = checkpoint.config
    compute_dtype = dtype if config.compute_dtype == config.param_dtype else config.compute_dtype
    arrays = cast(checkpoint.arrays, dtype)
    if dtype == "float16" and layout in LAYOUTS:
        arrays |= cast(lazy(checkpoint.arrays).select(family(layout).kept_arrays(config)), "float32")
    return replace(
        checkpoint,
        config=config.replace(param_dtype=dtype, compute_dtype=compute_dtype),
        arrays=arrays,
        unused=cast(checkpoint.unused, dtype),
        training=None,
    )


@dataclass(frozen=True)
class Movement:
    """How far the logits of one checkpoint are from another's, both computed in float32 on random tokens."""

    largest: float  # absolute difference
    scale: float  # largest absolute logit of the first checkpoint
    same: int  # positions at which the most probable token is the same
    positions: int

    def __str__(self) -> str:
        """One line."""
        share = f"the most probable token is the same at {self.same} of {self.positions} positions of random tokens"
        return f"logits moved by at most {self.largest:.2g}, the largest being {self.scale:.2g}; {share}"


def logit_movement(before: Checkpoint, after: Checkpoint) -> Movement:
    """Compares the logits of two checkpoints of one model; one of them at a time is in memory, in float32."""
    first, second = (_logits(checkpoint) for checkpoint in (before, after))
    same = first.argmax(-1) == second.argmax(-1)
    return Movement(float(np.abs(first - second).max()), float(np.abs(first).max()), int(same.sum()), same.size)


def _logits(checkpoint: Checkpoint) -> np.ndarray:
    """Logits (B, T, V) of the PyTorch model in float32."""
    import torch

    config = checkpoint.config.replace(param_dtype="float32", compute_dtype="float32")
    model = Checkpoint(config, cast(checkpoint.arrays, "float32")).to_torch().eval()
    with torch.inference_mode():
        return model(*(torch.from_numpy(tokens) for tokens in _random_tokens(config))).numpy()


def _random_tokens(config: TransformerConfig) -> list[np.ndarray]:
    """Source and target ids (B, S), none of them padding; source and target are of one length."""
    random, shape = np.random.default_rng(0), (_SENTENCES, min(_LENGTH, config.max_length))
    sides = [random.integers(0, size - 1, shape) for size in (config.src_vocab_size, config.tgt_vocab_size)]
    return [tokens + (tokens >= config.pad_id) for tokens in sides]
