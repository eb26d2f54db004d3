"""An estimate of what an update costs each device of a mesh, from formulas: nothing is compiled.

Bytes of the state are exact. What the backward pass keeps is traced from the model itself. If memory is short, XLA
keeps only the results of matrix products and computes the rest again: temporaries are these, the logits in float32, and
the gradients. Bytes moved and communication are formulas; a compiled program may move more or less.

Source: Austin et al. 2025, "How to Scale Your Model", part 5, for the communication.
"""

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from ..configs.execution import ExecutionConfig
from ..configs.schema import TransformerConfig
from ..configs.sharding import ShardingConfig
from ..configs.training import TrainingConfig
from ..flax_transformer.dropout import DropoutKey
from ..flax_transformer.model import Transformer
from ..train.step.losses import cross_entropy
from ..train.step.partitioning import partition
from ..train.step.step import abstract_state
from .cost import Collective, Cost, Memory
from .flops import executed_flops
from .workload import Workload

_ROWS = 8  # sentences in the traced batch; what is kept is proportional to their number


def estimate(workload: Workload, sharding: ShardingConfig) -> tuple[Cost, Memory]:
    """Cost and memory of an update per device of a mesh, all of whose sizes are given."""
    workload = workload.padded(sharding)
    run, shares = workload.run, sharding.data * sharding.fsdp
    state = abstract_state(run.model, run.training)
    arguments = sum(shard_bytes(state, sharding)) + _batch_bytes(workload) // shares
    weights = _weight_bytes(workload, sharding)
    residual_bytes, products = (_kept_bytes(workload, sharding, only_products) for only_products in (False, True))
    gradients = weights["gradients"]
    shape = workload.rows_of_passes, workload.src_length, workload.tgt_length
    flops = executed_flops(run.model, *shape, run.execution.remat)
    # State, gradients, and what is kept are written and read; weights are read in three products.
    hbm_bytes = 2 * arguments + 2 * gradients + 3 * run.training.accumulation * weights["products"]
    hbm_bytes += 2 * residual_bytes * run.training.accumulation
    cost = Cost(flops / (shares * sharding.tensor), hbm_bytes, tuple(_collectives(workload, sharding, weights)))
    logits = 4 * workload.rows_of_passes * workload.tgt_length * run.model.tgt_vocab_size
    logits //= shares * run.training.accumulation * sharding.tensor
    return cost, Memory(arguments, min(residual_bytes, products) + logits + gradients)


def shard_bytes(state: Any, sharding: ShardingConfig) -> list[int]:
    """Bytes of each array of a state on one device. The axes divide all dimensions: `ShardingConfig.check` says so."""
    sizes = vars(sharding)
    parts = []
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        axes = [*partition(path), *[None] * array.ndim]
        dims = (d // (sizes[a] if a else 1) for d, a in zip(array.shape, axes, strict=False))
        parts.append(math.prod(dims) * array.dtype.itemsize)
    return parts


def _batch_bytes(workload: Workload) -> int:
    return 4 * workload.rows * (workload.src_length + 2 * workload.tgt_length + 1)


def _weight_bytes(workload: Workload, sharding: ShardingConfig) -> dict[str, int]:
    """Bytes of parameters on a device, complete along `fsdp`: of all in products, as gradients, and of the matrices."""
    run = workload.run
    state = abstract_state(run.model, run.training)
    params = jax.tree_util.tree_leaves_with_path({"params": state.params})
    gathered = ShardingConfig(data=1, fsdp=1, tensor=sharding.tensor)
    local = shard_bytes({"params": state.params}, gathered)
    ratio = jnp.dtype(run.model.compute_dtype).itemsize / jnp.dtype(run.model.param_dtype).itemsize
    divided = sum(size for (path, _), size in zip(params, local, strict=True) if "fsdp" in partition(path))
    products = int(sum(local) * ratio)
    return {"products": products, "gradients": products, "fsdp": int(divided * ratio)}


def _kept_bytes(workload: Workload, sharding: ShardingConfig, only_products: bool) -> int:
    """Bytes that the backward pass of one micro-batch keeps on a device."""
    run = workload.run
    rows = workload.rows_of_passes / (sharding.data * sharding.fsdp * run.training.accumulation)
    lengths = workload.src_length, workload.tgt_length
    traced = _traced_bytes(run.model, sharding.tensor, run.execution, *lengths, only_products)
    return int(traced * rows / _ROWS)


@lru_cache(maxsize=64)
def _traced_bytes(
    config: TransformerConfig,
    tensor: int,
    execution: ExecutionConfig,
    src_length: int,
    tgt_length: int,
    only_products: bool,
) -> int:
    """Bytes that `jax.vjp` keeps for a batch of `_ROWS` on one of `tensor` devices, apart from the parameters."""
    training = TrainingConfig()
    policies = jax.checkpoint_policies
    model = _local(config, tensor)
    state = abstract_state(model, training)

    def residuals(params: Any, src: Any, tgt: Any, rows: Any) -> Any:
        def loss(params: Any) -> Any:
            twin = Transformer.from_arrays(model, {**state_buffers, **params}, execution)
            logits = twin(src, tgt, dropout_key=DropoutKey(jnp.uint32(0), jnp.int32(0), rows))
            return cross_entropy(logits, tgt, model.pad_id, training)

        # With `remat`, the model itself decides what is kept.
        policy_loss = jax.checkpoint(loss, policy=policies.dots_saveable) if only_products else loss
        return jax.vjp(loss if execution.remat != "none" else policy_loss, params, has_aux=True)[1]

    state_buffers = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state.buffers)
    tokens = [jax.ShapeDtypeStruct((_ROWS, length), jnp.int32) for length in (src_length, tgt_length)]
    out = jax.eval_shape(residuals, state.params, *tokens, jax.ShapeDtypeStruct((_ROWS,), jnp.int32))
    leaf_sizes = [(a.shape, math.prod(a.shape) * a.dtype.itemsize) for a in jax.tree.leaves(out)]
    return sum(size for shape, size in leaf_sizes if _has_rows(shape))


def _has_rows(shape: tuple[int, ...]) -> bool:
    """Whether an array belongs to the batch: its first dimension has the rows, or the second, after scanned layers."""
    return _ROWS in shape[:2]


def _local(config: TransformerConfig, tensor: int) -> TransformerConfig:
    """The model that one of `tensor` devices computes."""
    if tensor == 1:
        return config
    sizes: dict[str, Any] = {
        name: getattr(config, name) and getattr(config, name) // tensor
        for name in ("num_heads", "decoder_num_heads", "d_ff", "decoder_d_ff", "src_vocab_size", "tgt_vocab_size")
    }
    widths = config.query_key_width(config.num_heads), config.value_width(config.num_heads)
    return config.replace(**sizes, head_dim=widths[0], v_head_dim=widths[1])


def _collectives(workload: Workload, sharding: ShardingConfig, weights: dict[str, int]) -> list[Collective]:
    """One sum of all gradients; with `fsdp`, the matrices are gathered; with `tensor`, sums of activations."""
    run, shares = workload.run, sharding.data * sharding.fsdp
    model, parts = run.model, run.training.accumulation
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    collectives = []
    scattered = weights["fsdp"] if sharding.data == 1 else 0  # XLA scatters them only if no other axis sums them
    if sharding.fsdp > 1:
        collectives.append(Collective("all-gather", sharding.fsdp, (), weights["fsdp"], 1))
        collectives.append(Collective("reduce-scatter", sharding.fsdp, (), scattered, 1))
    if shares > 1:
        collectives.append(Collective("all-reduce", shares, (), weights["gradients"] - scattered, 1))
    if sharding.tensor > 1:
        row = workload.rows_of_passes // (shares * parts) * model.d_model * itemsize
        source, target = row * workload.src_length, row * workload.tgt_length
        # Forward and backward: after each attention and feed-forward layer, and after each look-up. Backward only: the
        # gradients of the encoder's output from each cross-attention, and of the decoder's from the output layer.
        encoder = 4 * model.num_encoder_layers + 1 + model.num_decoder_layers
        decoder = 6 * model.num_decoder_layers + 1 + 1
        for size, number in ((source, encoder), (target, decoder)):
            collectives.append(Collective("all-reduce", sharding.tensor, (), size, number * parts))
    return collectives
