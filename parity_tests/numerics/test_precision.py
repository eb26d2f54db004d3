"""Operations that must be float32 are not computed in bfloat16; checked in the traced programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.support.cases import INPUTS, factors
from parity_tests.support.precision import narrow_in_jax, narrow_in_torch, narrow_operations, rounded_between
from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.parity.functions import random_arrays, random_batch
from twinax.torch_reference import losses as torch_losses
from twinax.train.checkpointing.checkpoints import average
from twinax.train.step import losses

pytestmark = pytest.mark.newest


def every_value_once() -> list[TransformerConfig]:
    """A minimal list of configs in which each value of each setting occurs."""
    values = {name: choices for name, choices in factors().items() if name not in INPUTS}
    configs = []
    for i in range(max(map(len, values.values()))):
        row: dict[str, Any] = {name: choices[i % len(choices)] for name, choices in values.items()}
        row |= {"tgt_vocab_size": 37, "src_vocab_size": 37, "cross_mask": "source", "d_model": 14, "num_heads": 7}
        row |= {"param_dtype": ("float32", "bfloat16")[i % 2], "compute_dtype": "bfloat16"}
        configs.append(TransformerConfig(**row))
    return configs


@pytest.mark.parametrize("config", every_value_once(), ids=lambda config: f"{config.norm}, {config.activation}")
def test_what_must_be_wide_is(config: TransformerConfig) -> None:
    batch = random_batch(config, np.random.default_rng(0), 3, 5, 4)
    with jax.enable_x64(False):
        operations = narrow_operations(config, random_arrays(config, 0), batch)
    assert {part: names for part, names in operations.items() if names} == {}
    assert len(operations) >= 6


@pytest.mark.parametrize("smoothing", ["all", "others", "others_but_padding"])
def test_the_loss_is_wide(smoothing: Any) -> None:
    config, labels = TrainingConfig(label_smoothing=0.1, smoothing=smoothing), np.array([[4, 5, 0], [6, 0, 0]])
    with jax.enable_x64(False):
        logits = jnp.zeros((2, 3, 37), jnp.bfloat16)
        jax_operations = narrow_in_jax(
            lambda z: losses.cross_entropy(z, jnp.asarray(labels), 0, config), logits, vocab_size=37
        )
    torch_logits = torch.zeros(2, 3, 37, dtype=torch.bfloat16)
    torch_operations = narrow_in_torch(
        lambda z: torch_losses.cross_entropy(z, torch.from_numpy(labels), 0, config), torch_logits, vocab_size=37
    )
    assert (jax_operations, torch_operations) == ([], [])


def test_averages_of_bfloat16_are_rounded_once() -> None:
    states = [{"a": jnp.asarray(row, jnp.bfloat16)} for row in np.random.default_rng(0).normal(size=(5, 100))]
    expected = jnp.asarray(np.mean([np.asarray(s["a"], np.float64) for s in states], axis=0), jnp.bfloat16)
    assert np.array_equal(np.asarray(average(states)["a"]), np.asarray(expected))
    narrow_mean = sum(state["a"] for state in states) / 5
    assert not np.array_equal(np.asarray(narrow_mean), np.asarray(expected))  # otherwise the test has no power


def test_a_narrow_operation_is_named() -> None:
    """The walk enters jit, scan and custom rules, and does not exempt the logits' bias as a residual."""

    def softmax(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c, jax.jit(jax.nn.softmax)(row)), 0, x)[1]

    operations = narrow_in_jax(softmax, jnp.zeros((2, 3), jnp.bfloat16), vocab_size=37)
    assert {name.split()[0] for name in operations} == {"exp", "div", "sub"}
    assert narrow_in_jax(softmax, jnp.zeros((2, 3), jnp.float32), vocab_size=37) == []
    x, bias = jnp.zeros((2, 37), jnp.bfloat16), jnp.zeros(37, jnp.bfloat16)
    assert narrow_in_jax(jnp.add, x, bias, vocab_size=37) != []
    assert narrow_in_jax(jnp.add, x, bias, vocab_size=5) == []
    tensor = torch.zeros(2, 37, dtype=torch.bfloat16)
    assert narrow_in_torch(lambda x: x.softmax(-1), tensor, vocab_size=5) == ["_softmax on torch.bfloat16[2, 37]"]
    assert narrow_in_torch(lambda x: x + x, tensor, vocab_size=37) != []
    assert narrow_in_torch(lambda x: x / 3, tensor, vocab_size=5) != []
    for function in (
        lambda x: x / torch.tensor(3.0),
        lambda x: x * torch.tensor(3.0),
        lambda x: x * x,
        lambda x: x + 1e-5,
        lambda x: torch.addmm(tensor[0], x, torch.zeros(37, 37, dtype=torch.bfloat16)),
    ):
        assert narrow_in_torch(function, tensor, vocab_size=37) != []
    assert narrow_in_jax(lambda x: x.at[0].multiply(x[1]), x, vocab_size=5) != []
    assert narrow_in_jax(lambda x: jax.lax.reduce(x, jnp.bfloat16(0), jax.lax.add, (0,)), x, vocab_size=5) != []


def test_rounding_between_wide_operations_is_named() -> None:
    def scores(x: jax.Array) -> jax.Array:
        return jax.nn.softmax((x / 2).astype(jnp.bfloat16).reshape(2, 37).astype(jnp.float32))

    array = jnp.zeros((2, 37), jnp.float32)
    assert rounded_between(jax.jit(scores), array, shapes={(2, 37)}) == ["bfloat16[2,37]"]
    assert rounded_between(scores, array, shapes={(2, 3)}) == []
    assert rounded_between(lambda x: (x / 2).astype(jnp.bfloat16), array, shapes={(2, 37)}) == []
