"""The Flax and the PyTorch model as functions of (arrays, batch) whose outputs have the same paths.

Each returns every activation, the logits, the loss and every gradient of the loss. Gradients have the Flax names and
layout in both.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .. import convert, flax_transformer, torch_reference
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..convert.port import flax_specs
from ..formulas.position_tables import POSITION_TABLES
from ..torch_reference import losses as torch_losses
from ..train.step import losses
from ..train.step.step import Batch as StepBatch
from ..train.step.step import make_train_step


class Batch(NamedTuple):
    """Sentence pairs as numpy arrays; `dropout` is (seed, update) or None."""

    src_tokens: np.ndarray  # (B, S)
    tgt_tokens: np.ndarray  # (B, T)
    labels: np.ndarray  # (B, T)
    src_mask: np.ndarray | None = None  # (B, S)
    tgt_mask: np.ndarray | None = None  # (B, T)
    dropout: tuple[int, int] | None = None


Outputs = dict[str, Any]
GRADIENTS = "gradients."
LOSS = TrainingConfig()  # cross entropy without smoothing, as in every oracle


@lru_cache(maxsize=4)
def flax_function(
    config: TransformerConfig, *, gradients: bool = True
) -> Callable[[Mapping[str, Any], Batch], Outputs]:
    """f(arrays by Flax name, batch), compiled once per shape."""
    trained = list(flax_specs(config, trained_only=True))

    def forward(arrays: Mapping[str, Any], batch: Batch) -> tuple[jax.Array, Outputs]:
        model = flax_transformer.Transformer.from_arrays(config, arrays)
        key = batch.dropout and flax_transformer.DropoutKey(*batch.dropout, jnp.arange(len(batch.labels)))
        logits, outputs = flax_transformer.activations(
            model, batch.src_tokens, batch.tgt_tokens, batch.src_mask, batch.tgt_mask, key
        )
        total, number = losses.cross_entropy(logits, jnp.asarray(batch.labels), config.pad_id, LOSS)
        loss = total / jnp.maximum(number, 1)
        return loss, outputs | {"loss": loss}

    def run(arrays: Mapping[str, Any], batch: Batch) -> Outputs:
        if not gradients:
            return forward(arrays, batch)[1]
        params = {name: arrays[name] for name in trained}
        (_, outputs), grads = jax.value_and_grad(lambda p: forward({**arrays, **p}, batch), has_aux=True)(params)
        return outputs | {GRADIENTS + name: g for name, g in grads.items()}

    return jax.jit(run)


@lru_cache(maxsize=4)
def step_function(
    config: TransformerConfig, *, gradients: bool = True
) -> Callable[[Mapping[str, Any], Batch], Outputs]:
    """As `flax_function`, but loss and gradients are those of the program that `twinax train` runs, without dropout."""
    forward = flax_function(config, gradients=False)
    step = make_train_step(config.without_dropout(), LOSS)

    def run(arrays: Mapping[str, Any], batch: Batch) -> Outputs:
        outputs = forward(arrays, batch)
        if not gradients:
            return outputs
        src, tgt, labels = (jnp.asarray(a, jnp.int32) for a in (batch.src_tokens, batch.tgt_tokens, batch.labels))
        step_batch = StepBatch(src, tgt, labels, jnp.arange(len(labels), dtype=jnp.int32))
        trained = flax_specs(config, trained_only=True)
        params = {name: jnp.asarray(arrays[name]) for name in trained}
        buffers = {name: jnp.asarray(array) for name, array in arrays.items() if name not in trained}
        sums = step.compute_sums(params, buffers, jnp.uint32(0), jnp.zeros((), jnp.int32), step_batch)
        count = jnp.maximum(sums.tokens, 1)
        return outputs | {"loss": sums.loss / count} | {GRADIENTS + n: g / count for n, g in sums.gradients.items()}

    return run


def torch_function(
    config: TransformerConfig, *, gradients: bool = True
) -> Callable[[Mapping[str, Any], Batch], Outputs]:
    """f(arrays by Flax name, batch) with the same outputs; the conversion rules translate the arrays."""

    def run(arrays: Mapping[str, Any], batch: Batch) -> Outputs:
        model = torch_reference.Transformer.from_state_dict(config, convert.to_state_dict(arrays, config))
        return run_torch(model, batch, gradients=gradients)

    return run


def run_torch(model: torch_reference.Transformer, batch: Batch, *, gradients: bool = True) -> Outputs:
    """The outputs of `torch_function` for an existing model."""
    config = model.config
    tokens = [torch.from_numpy(array) for array in (batch.src_tokens, batch.tgt_tokens)]
    masks = [None if mask is None else torch.from_numpy(mask) for mask in (batch.src_mask, batch.tgt_mask)]
    rows = torch.arange(len(batch.labels))
    key = batch.dropout and torch_reference.DropoutKey(*batch.dropout, rows)
    with torch.set_grad_enabled(gradients):
        logits, outputs = torch_reference.activations(model, *tokens, *masks, key)
        total, number = torch_losses.cross_entropy(logits, torch.from_numpy(batch.labels), config.pad_id, LOSS)
        loss = total / number.clamp(min=1)
    outputs = {name: value.detach() for name, value in outputs.items()} | {"loss": loss.detach()}
    if gradients:
        names, params = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, params, materialize_grads=True)
        by_name = convert.to_params(dict(zip(names, grads, strict=True)), config, trained_only=True)
        outputs |= {GRADIENTS + name: g for name, g in by_name.items()}
    return outputs


def output_bytes(config: TransformerConfig, sentences: int, tokens: int) -> int:
    """Bytes of all outputs of a model on a batch of sentences with so many tokens per side, without gradients."""
    ids: Any = jax.ShapeDtypeStruct((sentences, tokens), jnp.int32)
    arrays = {name: jax.ShapeDtypeStruct(*spec) for name, spec in flax_specs(config).items()}
    with jax.enable_x64(config.compute_dtype == "float64"):
        outputs = jax.eval_shape(flax_function(config, gradients=False), arrays, Batch(ids, ids, ids))
    return sum(output.size * output.dtype.itemsize for output in jax.tree.leaves(outputs))


def product_ratio(config: TransformerConfig, inputs: int) -> float:
    """Error of XLA's float32 product x W / PyTorch's, both against float64, with W of the widest layer.

    On some machines PyTorch's product is more accurate, which no port can change.
    """
    rng, widest = np.random.default_rng(0), max(config.d_ff, config.decoder_d_ff or 0)
    shapes = (14, widest), (widest, config.d_model)
    return _error_ratio(tuple(rng.standard_normal(shape, np.float32) for shape in shapes) for _ in range(inputs))


def sum_ratio(config: TransformerConfig, rows: int) -> float:
    """As `product_ratio`, of the product whose sums run over the rows of a batch, as in the gradients of weights.

    Its numbers are positive, as probabilities are: then the order of a sum matters most.
    """
    rng = np.random.default_rng(0)
    shapes = (config.d_model, rows), (rows, config.d_model)
    return _error_ratio([tuple(rng.random(shape, np.float32) for shape in shapes)])


def _error_ratio(products: Iterable[tuple[np.ndarray, ...]]) -> float:
    squares = np.zeros(2)
    with jax.enable_x64(False):
        for x, w in products:
            exact = x.astype(np.float64) @ w.astype(np.float64)
            flax, pytorch = jnp.dot(x, w), torch.from_numpy(x) @ torch.from_numpy(w)
            squares += [np.square(np.asarray(side, np.float64) - exact).sum() for side in (flax, pytorch)]
    return float(np.sqrt(squares[0] / squares[1]))


def random_arrays(config: TransformerConfig, seed: int) -> dict[str, np.ndarray]:
    """Random parameters, and tables, of a model. Norm scales and biases are random too, because 1 and 0 hide mistakes.

    Kernels are N(0, 1/inputs), embeddings N(0, 1/D); drawn by numpy, which compiles nothing.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, (shape, dtype) in flax_specs(config).items():
        if name.endswith(".table") and config.positions in POSITION_TABLES:
            array = POSITION_TABLES[config.positions](*shape)
        elif name.endswith((".scale", ".bias")):
            array = rng.uniform(0.5, 1.5, shape) - (0 if name.endswith(".scale") else 1)
        else:
            inputs = shape[0] if name.endswith(".kernel") else config.d_model
            array = rng.normal(0, inputs**-0.5, shape)
        arrays[name] = array.astype(jnp.dtype(dtype))
    return arrays


def random_batch(
    config: TransformerConfig, rng: np.random.Generator, batch: int, src_length: int, tgt_length: int
) -> Batch:
    """Random sentences with ragged padding at the end of both sides: the first row is full, the second is not.

    Both sides have the source's length if the model requires equal lengths.
    """
    if config.cross_mask == "encoder":
        tgt_length = src_length

    def side(vocab_size: int, length: int) -> np.ndarray:
        tokens = rng.integers(0, vocab_size, (batch, length))
        tokens[tokens == config.pad_id] = (config.pad_id + 1) % vocab_size
        lengths = rng.integers(1, length + 1, batch)
        lengths[0] = length
        if batch > 1 and length > 1 and lengths[1] == length:
            lengths[1] = length - 1
        return np.where(np.arange(length) < lengths[:, None], tokens, config.pad_id)

    tgt = side(config.tgt_vocab_size, tgt_length)
    labels = np.concatenate([tgt[:, 1:], np.full((batch, 1), config.pad_id)], axis=1)
    return Batch(side(config.src_vocab_size, src_length), tgt, labels)
