"""Conversion of a checkpoint's weights to another floating-point dtype, and what that does to the logits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..configs.schema import TransformerConfig
from ..formulas.position_tables import POSITION_TABLES
from .arrays import cast
from .checkpoint import Checkpoint
from .file_layouts import PUBLISHED
from .hugging_face import LAYOUTS, family
from .layouts import fairseq
from .layouts.hugging_face import POSITIONS
from .lazy_arrays import lazy, same_bits

DTYPES = ("bfloat16", "float16", "float32")
_SENTENCES, _LENGTH = 8, 16  # of the random tokens


def to_dtype(checkpoint: Checkpoint, dtype: str, layout: str) -> Checkpoint:
    """The checkpoint with weights of another dtype, without optimizer, to be written in a layout.

    Numbers are rounded to nearest, ties to even. In float16, arrays that the layout's family keeps in float32 stay so.
    Position tables that a layout or the formula computes are computed in the new dtype.

    Raises:
        ConversionError: on reading an array, a number is beyond the range of the dtype.
    """
    config = checkpoint.config
    compute_dtype = dtype if config.compute_dtype == config.param_dtype else config.compute_dtype
    arrays = cast(checkpoint.arrays, dtype) | _position_tables(checkpoint, dtype, layout)
    if dtype == "float16" and layout in LAYOUTS:
        arrays |= cast(lazy(checkpoint.arrays).select(family(layout).kept_arrays(config)), "float32")
    return replace(
        checkpoint,
        config=config.replace(param_dtype=dtype, compute_dtype=compute_dtype),
        arrays=arrays,
        unused=cast(checkpoint.unused, dtype),
        training=None,
    )


def _position_tables(checkpoint: Checkpoint, dtype: str, layout: str) -> dict[str, np.ndarray]:
    """The fixed position tables in a dtype, computed as they were; one that nothing computes is left out.

    Rounding the tables of a narrow dtype again would give others, which families that compute them cannot store.
    """
    before = checkpoint.config
    after = before.replace(param_dtype=dtype)
    used = slice(before.position_offset, before.position_offset + before.max_length)
    tables: dict[str, np.ndarray] = {}
    for name in (checkpoint.layout or "", checkpoint.system or "", layout.partition(":")[0], ""):
        originals, computed = _computed_tables(before, name), _computed_tables(after, name)
        for path in originals.keys() - tables.keys():
            array, original = checkpoint.arrays[path], originals[path]
            rows = next((rows for rows in (slice(None), used) if same_bits(array[rows], original[rows])), None)
            if rows is not None:
                tables[path] = array.astype(dtype)
                tables[path][rows] = computed[path][rows]
    return tables


def _computed_tables(config: TransformerConfig, layout: str) -> Mapping[str, np.ndarray]:
    """The position tables that a layout computes for a config, without a layout the formula, by Flax name."""
    if config.positions not in POSITION_TABLES:
        return {}
    if layout in LAYOUTS:
        return family(layout).position_tables(config)
    if layout == "fairseq":
        return fairseq.position_tables(config)
    if layout in PUBLISHED:
        return PUBLISHED[layout].tables(config)
    table = POSITION_TABLES[config.positions](config.table_length, config.d_model).astype(config.param_dtype)
    return {f"{module}.table": table for module in POSITIONS}


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
        return model(*(torch.from_numpy(tokens) for tokens in random_tokens(config))).numpy()


def random_tokens(config: TransformerConfig) -> list[np.ndarray]:
    """Source and target ids (B, S), none of them padding; source and target are of one length."""
    random, shape = np.random.default_rng(0), (_SENTENCES, min(_LENGTH, config.max_length))
    sides = [random.integers(0, size - 1, shape) for size in (config.src_vocab_size, config.tgt_vocab_size)]
    return [tokens + (tokens >= config.pad_id) for tokens in sides]
