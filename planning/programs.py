"""The jitted programs of a run, lowered for devices that need not exist: nothing is allocated or run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..configs.decoding import DecodingConfig
from ..configs.sharding import ShardingConfig
from ..flax_transformer.decoding.programs import grow, search_programs
from ..formulas.decoding import without_cache
from ..train.loop.evaluate import make_validation_loss
from ..train.step.partitioning import Placement
from ..train.step.step import Batch, abstract_state, make_train_step
from .workload import Workload

SENTENCES = 32  # per batch of beam search, and at least one per device that divides rows
BEAM_SIZE = 5


class Compiled(NamedTuple):
    """A compiled program."""

    name: str  # train step, validation loss, beam search
    program: Any  # jax.stages.Compiled
    loops: int  # runs of a loop whose end depends on data: the tokens that a search writes


def compile_step(workload: Workload, placement: Placement) -> Compiled:
    """The train step of a batch shape, as one program: both of its programs need all gradients at once."""
    run = workload.run
    state = placement.abstract(abstract_state(run.model, run.training))
    step = make_train_step(run.model, run.training, placement, run.execution)
    return Compiled("train step", step.lower(state, _batch(workload, placement)).compile(), 1)


def compile_loss(workload: Workload, placement: Placement) -> Compiled:
    """The validation loss of a batch shape."""
    loss: Any = make_validation_loss(workload.run.model, workload.run.execution)
    arrays, batch = _arrays(workload, placement), _batch(workload, placement)
    return Compiled("validation loss", loss.lower(arrays, *batch[:3]).compile(), 1)


def translates(workload: Workload) -> bool:
    """Whether beam search is planned: validation translates, with a key-value cache; else each length is compiled."""
    return workload.run.loop.translations > 0 and without_cache(workload.run.model) is None


def compile_search(workload: Workload, placement: Placement) -> Compiled:
    """The loop of beam search, with a cache as long as the targets."""
    model = workload.run.model
    arrays = _arrays(workload, placement)
    decoding = DecodingConfig(beam_size=BEAM_SIZE, max_length=min(workload.tgt_length, model.max_length))
    programs: Any = search_programs((model,), decoding)
    prefill, extend = programs
    rows = search_rows(placement.config)
    sharding, whole = placement.row_sharding, NamedSharding(placement.mesh, PartitionSpec())
    src = jax.ShapeDtypeStruct((rows, workload.src_length), jnp.int32, sharding=sharding)
    keep = jax.ShapeDtypeStruct(src.shape, jnp.bool_, sharding=sharding)
    draws = jax.ShapeDtypeStruct((rows, decoding.beam_size, 0), jnp.float32, sharding=sharding)
    rules = jax.ShapeDtypeStruct((rows, 0), jnp.int32, sharding=sharding)
    memory, search, past = jax.eval_shape(prefill, [arrays], [(src, keep)], draws, rules)
    past = jax.eval_shape(lambda past: grow(past, decoding.max_length or 1), past)
    # As the first program returns them: batches are divided, and the number of steps is known to all devices.
    states = jax.tree.map(lambda a: _abstract(a, sharding if a.ndim else whole), (memory, search, past))
    memory, search, past = states
    compiled = extend.lower([arrays], memory, [(src, keep)], search, past, decoding.max_length or 1, 0).compile()
    return Compiled("beam search", compiled, decoding.max_length or 1)


def search_rows(sharding: ShardingConfig) -> int:
    """Sentences per batch of beam search: devices divide them."""
    shares = sharding.data * sharding.fsdp
    return max(SENTENCES + -SENTENCES % shares, shares)


def _arrays(workload: Workload, placement: Placement) -> Any:
    """The abstract arrays of the model."""
    state = abstract_state(workload.run.model, workload.run.training)
    return placement.abstract({**state.buffers, **state.params})


def _batch(workload: Workload, placement: Placement) -> Batch:
    """An abstract batch, with its rows divided over the devices."""
    padded = workload.padded(placement.config)
    return Batch(*placement.abstract_rows(padded.rows, padded.src_length, padded.tgt_length))


def _abstract(array: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
