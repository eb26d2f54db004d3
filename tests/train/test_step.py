"""The JAX train step: pure, compiled once, independent of accumulation and devices; and its errors."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.configs import ConfigError
from twinax.configs.sharding import ShardingConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.unused_parameters import without_gradient
from twinax.parity.functions import random_arrays, random_batch
from twinax.torch_reference import optimizers as torch_optimizers
from twinax.torch_reference import step as torch_step
from twinax.train.step import step
from twinax.train.step.partitioning import describe_devices

MODEL = TransformerConfig.preset(
    "tiny", num_encoder_layers=1, num_decoder_layers=1, attention_dropout=0.1, ffn_dropout=0.1,
    param_dtype="float64", compute_dtype="float64",
)  # fmt: skip
TRAINING = TrainingConfig(warmup_updates=10, label_smoothing=0.1, clip_norm=1.0, optimizer="adamw", weight_decay=0.01)


def new_state(model_config=MODEL, config=TRAINING):
    arrays = {name: jnp.asarray(a) for name, a in random_arrays(model_config, 0).items()}
    return step.init_state(flax_transformer.Transformer.from_arrays(model_config, arrays), config)


def batch(number=0, sentences=6):
    arrays = random_batch(MODEL, np.random.default_rng(number), sentences, 7, 5)
    rows = np.arange(sentences) + sentences * number
    return step.Batch(*(jnp.asarray(a) for a in (arrays.src_tokens, arrays.tgt_tokens, arrays.labels, rows)))


def copied(state):
    return jax.tree.map(lambda a: np.array(a), state)


def largest_difference(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() for a, b in pairs)


@pytest.fixture(scope="module")
def plain_step():
    return step.make_train_step(MODEL, TRAINING)


def test_gradients_are_traced_once_per_shape_and_the_update_once(monkeypatch):
    monkeypatch.setattr(step, "_sum_over_parts", chex.assert_max_traces(step._sum_over_parts, n=2))
    monkeypatch.setattr(step, "clip", chex.assert_max_traces(step.clip, n=1))
    run, state = step.make_train_step(MODEL, TRAINING), new_state()
    for number in range(4):
        state, _ = run(state, batch(number))
    for number in range(3):
        state, _ = run(state, batch(number, sentences=4))
    assert int(state.update) == 7


def test_the_state_is_donated_and_nothing_waits_for_the_host(plain_step):
    state, first_batch = new_state(), batch(0)
    _, _ = plain_step(new_state(), first_batch)  # after compilation, constants are on the device
    with jax.transfer_guard("disallow"):
        result, metrics = plain_step(state, first_batch)
    assert all(a.is_deleted() for a in jax.tree.leaves(state.params))
    assert all(isinstance(value, jax.Array) for value in metrics)
    assert not any(a.is_deleted() for a in jax.tree.leaves(result))


def test_equal_states_and_batches_give_equal_updates(plain_step):
    results = [copied(plain_step(new_state(), batch(3))) for _ in range(2)]
    chex.assert_trees_all_equal(*results)


def test_parts_are_the_whole_batch_to_rounding(plain_step):
    """Parts are weighted by tokens: their counts differ, and one part has none; dropout is on."""
    full_batch = batch(1)
    labels = full_batch.labels.at[-1].set(MODEL.pad_id)
    full_batch = full_batch._replace(labels=labels)
    accumulated_step = step.make_train_step(MODEL, TrainingConfig(**{**vars(TRAINING), "accumulation": 6}))
    expected, actual = plain_step(new_state(), full_batch), accumulated_step(new_state(), full_batch)
    assert largest_difference(expected[1], actual[1]) < 1e-13
    # Adam's first update is the gradient's sign, which may be noise: compare the moments instead
    assert largest_difference(expected[0].optimizer, actual[0].optimizer) < 1e-14


def test_padding_changes_nothing(plain_step):
    """Two more columns of padding on both sides give the same masks and gradients."""
    short_batch = batch(2)

    def widen(tokens):
        return jnp.pad(tokens, ((0, 0), (0, 2)), constant_values=MODEL.pad_id)

    long_batch = step.Batch(*(widen(tokens) for tokens in short_batch[:3]), short_batch.rows)
    expected, actual = plain_step(new_state(), short_batch), plain_step(new_state(), long_batch)
    assert largest_difference(expected[0].optimizer, actual[0].optimizer) < 1e-14


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_narrow_number_types(compute):
    """Parameters and moments stay float32; the loss falls."""
    config = MODEL.replace(param_dtype="float32", compute_dtype=compute)
    training = TrainingConfig(schedule="constant", learning_rate=3e-3, warmup_updates=0)
    run, state, losses = step.make_train_step(config, training), new_state(config, training), []
    for _ in range(30):
        state, metrics = run(state, batch(0))
        losses.append(float(metrics.loss))
    assert {a.dtype for a in state.params.values()} == {np.dtype(np.float32)}
    assert metrics.loss.dtype in (np.float32, np.float64)
    assert losses[-1] < 0.7 * losses[0]


def test_a_batch_of_padding_changes_nothing_and_says_so(plain_step):
    state = new_state()
    expected = copied(state)
    result, metrics = plain_step(state, batch()._replace(labels=jnp.full((6, 5), MODEL.pad_id)))
    chex.assert_trees_all_equal(copied(result), expected)
    assert (float(metrics.loss), int(metrics.tokens)) == (0.0, 0)
    assert step.explain(result, metrics) == "update 0: the batch has no token but padding; nothing was changed"


def test_a_gradient_that_is_not_finite_is_refused_and_named(plain_step):
    state, _ = plain_step(new_state(), batch(0))
    name = "decoder.layers.0.feed_forward.outer_proj.bias"
    state = state._replace(params={**state.params, name: state.params[name].at[3].set(jnp.inf)})
    expected = copied(state)
    result, metrics = plain_step(state, batch(1))
    chex.assert_trees_all_equal(copied(result), expected)
    line = step.explain(result, metrics)
    assert line.startswith("update 1: the norm of the gradient of decoder.final_norm.bias and ")
    assert line.endswith("is not finite (loss nan); nothing was changed")
    healthy, metrics = plain_step(new_state(), batch(1))
    assert step.explain(healthy, metrics) is None


def test_the_reference_refuses_the_same():
    model = convert.to_torch(
        flax_transformer.Transformer.from_arrays(MODEL, {n: jnp.asarray(a) for n, a in random_arrays(MODEL, 0).items()})
    )
    optimizer = torch_optimizers.make_optimizer(model, TRAINING)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = torch_step.Batch(*(torch.tensor(np.asarray(a)) for a in batch()))
    empty = tensors._replace(labels=torch.full_like(tensors.labels, MODEL.pad_id))
    metrics = torch_step.train_step(model, optimizer, TRAINING, 0, empty)
    assert (metrics.loss, metrics.tokens, metrics.applied) == (0.0, 0, False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert torch_step.explain(metrics) == "update 0: the batch has no token but padding; nothing was changed"
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.outer_proj.bias[3] = torch.inf
    metrics = torch_step.train_step(model, optimizer, TRAINING, 5, tensors)
    assert re.fullmatch(
        r"update 5: the norm of the gradient of \S+ and \d+ more is not finite \(loss nan\); nothing was changed",
        torch_step.explain(metrics) or "",
    )
    assert not optimizer.state
    with pytest.raises(ValueError, match="accumulation=4: does not divide the batch of 6 sentences"):
        torch_step.train_step(model, optimizer, TrainingConfig(accumulation=4), 0, tensors)


def test_a_loss_alone_that_is_not_finite_is_refused(plain_step):
    """An output bias of -inf, as for a suppressed token, with smoothing: every gradient is finite."""
    model = flax_transformer.Transformer.from_arrays(
        MODEL, {n: jnp.asarray(a) for n, a in random_arrays(MODEL, 0).items()}
    )
    model.output.bias[...] = model.output.bias[...].at[MODEL.tgt_vocab_size - 1].set(-jnp.inf)
    torch_model = convert.to_torch(model)
    state = step.init_state(model, TRAINING)
    data = batch()
    data = data._replace(labels=jnp.where(data.labels == MODEL.tgt_vocab_size - 1, 5, data.labels))
    tensors = torch_step.Batch(*(torch.tensor(np.asarray(a)) for a in data))
    state, metrics = plain_step(state, data)
    torch_metrics = torch_step.train_step(
        torch_model, torch_optimizers.make_optimizer(torch_model, TRAINING), TRAINING, 0, tensors
    )
    line = "update 0: the loss is not finite (loss inf); nothing was changed"
    assert (step.explain(state, metrics), torch_step.explain(torch_metrics)) == (line, line)
    assert float(metrics.gradient_norm) == pytest.approx(torch_metrics.gradient_norm, rel=1e-13)


def test_float16_parameters_are_refused():
    config = MODEL.replace(param_dtype="float16", compute_dtype="float16")
    with pytest.raises(ConfigError, match=r"^param_dtype='float16': squares of gradients do not fit"):
        step.make_train_step(config, TRAINING)
    with pytest.raises(ConfigError, match=r"^param_dtype='float16': squares of gradients do not fit"):
        torch_optimizers.make_optimizer(torch_reference.Transformer(config), TRAINING)


@pytest.mark.parametrize("name", ["src_tokens", "tgt_tokens", "rows"])
def test_arrays_of_different_batches(name):
    data = batch()
    data = data._replace(**{name: getattr(data, name)[:4]})
    line = f"^{name}: must have 6 rows, as labels, not 4"
    with pytest.raises(ValueError, match=line):
        step.make_train_step(MODEL, TrainingConfig(accumulation=2))(new_state(), data)
    model = torch_reference.Transformer(MODEL)
    tensors = torch_step.Batch(*(torch.tensor(np.asarray(a)) for a in data))
    with pytest.raises(ValueError, match=line):
        torch_step.train_step(model, torch_optimizers.make_optimizer(model, TRAINING), TRAINING, 0, tensors)


def test_parts_that_do_not_divide_the_batch():
    run = step.make_train_step(MODEL, TrainingConfig(accumulation=4))
    with pytest.raises(ValueError, match="accumulation=4: does not divide the batch of 6 sentences"):
        run(new_state(), batch())


def test_what_the_loss_does_not_reach_is_what_torch_gives_no_gradient():
    assert without_gradient(MODEL) == frozenset()
    config = MODEL.replace(cross_attention_residual="query_only")
    model = torch_reference.Transformer(config)
    tokens = torch.tensor([[4, 5], [6, 7]])
    model(tokens, tokens).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    unused = {name for name, gradient in gradients.items() if gradient is None}
    assert unused
    rules = convert.port.port_rules(convert.port.flax_specs(config, trained_only=True))
    assert without_gradient(config) == {rule.source[0] for rule in rules if rule.target[0] in unused}


def test_devices_are_described():
    line = describe_devices(["NVIDIA H100"] * 4, ShardingConfig(data=2, tensor=2))
    assert line == "devices: 4 × NVIDIA H100; data=2 · fsdp=1 · tensor=2; each computes 1/2 of the rows of a batch"
