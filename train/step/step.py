"""One training step: a pure function of (state, batch), in two jitted programs; the input state is donated.

Letters: B sentences in the whole batch, S source length, T target length.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt

from ...configs.execution import PLAIN, ExecutionConfig
from ...configs.schema import TransformerConfig
from ...configs.training import TrainingConfig, check_trainable
from ...flax_transformer.dropout import DropoutKey
from ...flax_transformer.model import Transformer
from ...flax_transformer.module import Buffer, at_least_float32, named_arrays
from ...flax_transformer.unused_parameters import without_gradient
from ...formulas.refused_updates import describe_refusal
from ...formulas.schedules import learning_rate
from .consistency import training_loss
from .optimizers import clip, make_optimizer
from .partitioning import Placement

Arrays = Mapping[str, Array]


class Batch(NamedTuple):
    """Sentence pairs. The decoder reads `tgt_tokens` and predicts `labels`, the same tokens shifted by one."""

    src_tokens: Int[Array, "B S"]
    tgt_tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    rows: Int[Array, " B"]  # positions of the sentences in the whole batch; dropout depends on them


class TrainState(NamedTuple):
    """The complete training state: equal states and equal batches give equal updates."""

    params: Arrays
    buffers: Arrays  # fixed tables
    optimizer: optax.OptState
    update: Int[Array, ""]  # number of updates applied
    seed: UInt[Array, ""]  # of dropout
    position: Int[Array, "2"]  # in the data: epoch, batch; set when a checkpoint is saved


class Metrics(NamedTuple):
    """What a step reports. The arrays stay on the device: reading one waits for the step."""

    loss: Float[Array, ""]  # nats per token, with the divergence of consistency training
    tokens: Int[Array, ""]  # labels that are not padding
    gradient_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    applied: Bool[Array, ""]  # False: the state is unchanged
    update: Int[Array, ""]  # number of the update, from 0
    nonfinite: Bool[Array, " P"]  # per parameter, sorted by name: whether its gradient norm is NaN or infinite


def init_state(model: Transformer, config: TrainingConfig) -> TrainState:
    """The state before the first update. It holds the model's own arrays, which the first step donates."""
    params, buffers = named_arrays(model, nnx.Param), named_arrays(model, Buffer)
    optimizer = make_optimizer(config, without_gradient(model.config)).init(params)
    update = jnp.zeros((), jnp.int32)
    return TrainState(params, buffers, optimizer, update, jnp.uint32(config.seed), jnp.zeros(2, jnp.int32))


@lru_cache(maxsize=8)
def abstract_state(model: TransformerConfig, training: TrainingConfig) -> TrainState:
    """Shapes and dtypes of the state before the first update."""
    arrays = named_arrays(Transformer.abstract(model))
    return jax.eval_shape(lambda arrays: init_state(Transformer.from_arrays(model, arrays), training), arrays)


class Sums(NamedTuple):
    """What a batch adds up to, before the division by its tokens."""

    loss: Float[Array, ""]  # nats
    tokens: Int[Array, ""]  # labels that are not padding
    gradients: Arrays  # of the loss; with reduction="parts", per token


class TrainStep:
    """A training step of two jitted programs: only the first depends on the batch's shape, and compiles for each."""

    def __init__(
        self,
        model_config: TransformerConfig,
        config: TrainingConfig,
        placement: Placement | None,
        execution: ExecutionConfig,
    ):
        self._model_config, self._config = model_config, config
        self._placement, self._execution = placement, execution
        self._optimizer = make_optimizer(config, without_gradient(model_config))
        self.compute_sums: Any = jax.jit(self._accumulate)  # (params, buffers, seed, update, batch) -> Sums
        self._apply: Any = jax.jit(self._update, donate_argnums=0)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The state after an update; the input state is donated."""
        return self._apply(state, self.compute_sums(*_read_by_gradients(state), batch))

    def compile_gradients(self, state: TrainState, batch: Batch) -> Callable[[TrainState, Batch], Sums]:
        """The compiled first program for the shapes of a batch. All arrays may be abstract."""
        program = self.compute_sums.lower(*_read_by_gradients(state), batch).compile()
        return lambda state, batch: program(*_read_by_gradients(state), batch)

    def compile_update(self, state: TrainState) -> Callable[[TrainState, Sums], tuple[TrainState, Metrics]]:
        """The compiled second program, which is the same for all batches. All arrays may be abstract."""
        total: Any = jax.ShapeDtypeStruct((), jnp.promote_types(self._model_config.compute_dtype, jnp.float32))
        tokens: Any = jax.ShapeDtypeStruct((), int)
        sums = Sums(total, tokens, dict(state.params))
        return self._apply.lower(state, sums if self._placement is None else self._placement.abstract(sums)).compile()

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """Both programs lowered as one, whose memory and operations can be analysed."""
        both: Any = jax.jit(self.__call__, donate_argnums=0)
        return both.lower(state, batch)

    def _update(self, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        total, tokens, gradients = sums
        config = self._config
        gradients = _per_token(gradients, tokens) if config.reduction == "tokens" else gradients
        squares = {name: jnp.square(at_least_float32(g)).sum() for name, g in sorted(gradients.items())}
        norm = jnp.sqrt(sum(squares.values(), start=jnp.zeros(())))
        rate = learning_rate(state.update, config, self._model_config.d_model, jnp)
        directions: Any
        directions, moments = self._optimizer.update(clip(gradients, norm, config), state.optimizer, state.params)
        params = {name: p - (rate * directions[name]).astype(p.dtype) for name, p in state.params.items()}

        loss = total / jnp.maximum(tokens, 1)
        applied = (tokens > 0) & jnp.isfinite(norm) & jnp.isfinite(loss)
        keep = partial(jax.tree.map, lambda new, old: jnp.where(applied, new, old))
        new_state = state._replace(
            params=keep(params, dict(state.params)),
            optimizer=keep(moments, state.optimizer),
            update=state.update + applied,
        )
        if self._placement is not None:
            new_state = self._placement.keep(new_state)
        nonfinite = ~jnp.isfinite(jnp.stack(list(squares.values())))
        return new_state, Metrics(loss, tokens, norm, rate, applied, state.update, nonfinite)

    def _accumulate(self, params: Arrays, buffers: Arrays, seed: Array, update: Array, batch: Batch) -> Sums:
        """The sums of a batch, computed in `accumulation` micro-batches."""
        model_config, config, placement = self._model_config, self._config, self._placement

        def loss(params: Arrays, part: Batch) -> tuple[Array, Array]:
            params = params if placement is None else placement.gather(params)
            model = Transformer.from_arrays(model_config, {**buffers, **params}, self._execution)
            key = DropoutKey(seed, update, part.rows)
            return training_loss(model, part.src_tokens, part.tgt_tokens, part.labels, key, config)

        def compute(part: Batch) -> Sums:
            (total, tokens), gradients = jax.value_and_grad(loss, has_aux=True)(params, part)
            return Sums(total, tokens, _per_token(gradients, tokens) if config.reduction == "parts" else gradients)

        sums = _sum_over_parts(compute, params, batch, config.accumulation, model_config)
        return sums if placement is None else placement.keep(sums)


def make_train_step(
    model_config: TransformerConfig,
    config: TrainingConfig,
    placement: Placement | None = None,
    execution: ExecutionConfig = PLAIN,
) -> TrainStep:
    """The step of a model and a training config, a pure function of (state, batch); compiled once per batch shape.

    `placement`: where the arrays of the state are, which the step keeps; None: XLA chooses. `execution` changes memory,
    time and compilation, and the result only by rounding.

    p <- p - rate · direction(clip(g)), where g is the gradient of (sum of losses) / (number of tokens), unless
    `reduction` sets another denominator. If the batch has no tokens, or if the loss or the gradient norm is not finite,
    the step changes nothing; `explain` returns the reason.

    Raises:
        ConfigError: the model's parameters are float16, or `execution` cannot compute its attention.
        ValueError: on a call: `accumulation` does not divide the batch, or its arrays differ in length.
    """
    check_trainable(model_config)
    execution.check(model_config)
    return TrainStep(model_config, config, placement, execution)


def _read_by_gradients(state: TrainState) -> tuple[Arrays, Arrays, Array, Array]:
    """What the gradients depend on; moments are not passed, so that only the second program holds them."""
    return state.params, state.buffers, state.seed, state.update


def _sum_over_parts(
    compute: Callable[[Batch], Sums], params: Arrays, batch: Batch, parts: int, model_config: TransformerConfig
) -> Sums:
    """The sums of a batch's parts, one after the other. A part is every n-th sentence."""
    sentences = len(batch.labels)
    for name, array in batch._asdict().items():
        if len(array) != sentences:
            raise ValueError(f"{name}: must have {sentences} rows, as labels, not {len(array)}")
    if sentences % parts:
        raise ValueError(f"accumulation={parts}: does not divide the batch of {sentences} sentences")
    if parts == 1:
        return compute(batch)
    # so that each device holds an equal share of every part
    stacked = jax.tree.map(lambda a: a.reshape(sentences // parts, parts, *a.shape[1:]).swapaxes(0, 1), batch)
    zero = jnp.zeros((), jnp.promote_types(model_config.compute_dtype, jnp.float32))
    zeros = Sums(zero, jnp.zeros((), int), jax.tree.map(jnp.zeros_like, dict(params)))
    add = partial(jax.tree.map, jnp.add)
    return jax.lax.scan(lambda sums, part: (add(sums, compute(part)), None), zeros, stacked)[0]


def _per_token(gradients: Arrays, tokens: Int[Array, ""]) -> Arrays:
    return jax.tree.map(lambda g: (at_least_float32(g) / jnp.maximum(tokens, 1)).astype(g.dtype), gradients)


def explain(state: TrainState, metrics: Metrics) -> str | None:
    """One line on why a step changed nothing; None if the update was applied. Waits for the step."""
    if metrics.applied:
        return None
    names = [name for name, nonfinite in zip(sorted(state.params), metrics.nonfinite, strict=True) if nonfinite]
    return describe_refusal(int(metrics.update), int(metrics.tokens), float(metrics.loss), names)
