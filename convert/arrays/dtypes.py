"""Conversion of a checkpoint's weights to another floating-point dtype, and what that does to the logits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...configs.schema import TransformerConfig
from ...formulas.position_tables import POSITION_TABLES
from ..checkpoint import Checkpoint
from ..formats.file_layouts import PUBLISHED, to_named
from ..formats.hugging_face import LAYOUTS, family
from ..layouts import fairseq
from ..layouts.hugging_face import POSITIONS
from .frameworks import cast, torch_view
from .lazy import lazy, same_bits

if TYPE_CHECKING:
    import torch

    from ... import torch_reference

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
    """Compare the logits of two checkpoints of one model; the arrays of one module at a time are in memory."""
    first, second = (_logits(checkpoint) for checkpoint in (before, after))
    same = first.argmax(-1) == second.argmax(-1)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))  # per sentence: no third copy
    return Movement(largest, float(max(first.max(), -first.min())), int(same.sum()), same.size)


def _logits(checkpoint: Checkpoint) -> np.ndarray:
    """Logits (B, T, V) of the PyTorch model in float32."""
    import torch

    from ...torch_reference.model import Transformer

    config = checkpoint.config.replace(param_dtype="float32", compute_dtype="float32")
    with torch.device("meta"):
        model = Transformer(config).eval()
    _load_by_module(model, to_named(cast(checkpoint.arrays, "float32"), config, "twinax"))
    with torch.inference_mode():
        return model(*(torch.from_numpy(tokens) for tokens in random_tokens(config))).numpy()


def _load_by_module(model: "torch_reference.Transformer", arrays: Mapping[str, np.ndarray]) -> None:
    """Make each module of a model on the meta device read its arrays when it is called, and drop them afterwards.

    The target embedding stays, because the output layer may use it too.
    """

    def add_hooks(module: "torch.nn.Module", names: Mapping[str, str], stays: bool) -> None:
        def load(*call: Any) -> None:
            tensors = {name: torch_view(arrays[path]) for name, path in names.items()}
            module.load_state_dict(tensors, strict=False, assign=True)

        def drop(*call: Any) -> None:
            module.to_empty(device="meta", recurse=False)

        module.register_forward_pre_hook(load)
        if not stays:
            module.register_forward_hook(drop)

    embedding = model.src_embedding if model.tgt_embedding is None else model.tgt_embedding
    for path, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if own:
            names = {name: f"{path}.{name}" for name, _ in own}
            add_hooks(module, names, stays=module is embedding and model.output.proj is None)


def random_tokens(config: TransformerConfig) -> list[np.ndarray]:
    """Source and target ids (B, S), none of them padding; source and target are of one length."""
    random, shape = np.random.default_rng(0), (_SENTENCES, min(_LENGTH, config.max_length))
    sides = [random.integers(0, size - 1, shape) for size in (config.src_vocab_size, config.tgt_vocab_size)]
    return [tokens + (tokens >= config.pad_id) for tokens in sides]
