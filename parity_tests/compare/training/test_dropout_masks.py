"""Two models in training mode are compared with the same dropout masks."""

import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from twinax.compare.capture.trace import CaptureError
from twinax.compare.comparison import compare

RATE, WIDTH, HEADS = 0.3, 16, 2
INPUTS = (np.random.default_rng(0).standard_normal((4, 12, WIDTH)),)


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=RATE, batch_first=True).train()


@pytest.fixture(scope="module")
def weights(reference):
    return {name: jnp.asarray(parameter.detach().numpy()) for name, parameter in reference.named_parameters()}


def drop(key, x, rate=RATE, scale=True):
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate) if scale else x, 0)


def drop_by_comparison(key, x):
    return x * (1 - (jax.random.uniform(key, x.shape) < RATE)) / (1 - RATE)


def norm(p, name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def port(mistake="", transposed=False):
    """The encoder layer with its four dropouts; keys last, then queries, in attention if transposed."""

    def run(p, x):
        keys = jax.random.split(jax.random.key(7), 4)
        packed = x @ p["self_attn.in_proj_weight"].T + p["self_attn.in_proj_bias"]
        q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(packed, 3, -1))
        axes = "bkhq" if transposed else "bhqk"
        scores = jnp.einsum(f"bqhd,bkhd->{axes}", q, k) / (WIDTH // HEADS) ** 0.5
        attention = jax.nn.softmax(scores, axes.index("k"))
        if mistake != "no attention dropout":
            attention = drop(keys[0], attention)
        mixed = jnp.einsum(f"{axes},bkhd->bqhd", attention, v).reshape(x.shape)
        mixed = mixed @ p["self_attn.out_proj.weight"].T + p["self_attn.out_proj.bias"]
        x = norm(p, "norm1", x + drop_by_comparison(keys[1], mixed))
        inner = jax.nn.relu(x @ p["linear1.weight"].T + p["linear1.bias"])
        inner = drop(keys[2], inner, 0.15 if mistake == "rate" else RATE, scale=mistake != "scale")
        outer = inner @ p["linear2.weight"].T + p["linear2.bias"]
        if mistake == "broadcast":
            keep = jax.random.bernoulli(keys[3], 1 - RATE, (x.shape[0], 1, x.shape[2]))
            return norm(p, "norm2", x + jnp.where(keep, outer / (1 - RATE), 0))
        return norm(p, "norm2", x + drop(keys[3], outer))

    return run


@pytest.mark.parametrize("transposed", [False, True])
def test_equal_models_are_equal_in_outputs_and_gradients(reference, weights, transposed):
    comparison = compare(reference, (port(transposed=transposed), weights), INPUTS, gradients=True, dropout=True)
    assert comparison.verdict == "equal", str(comparison)
    assert comparison.backward is not None


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("rate", "dropout rate of about 0.1"),
        ("no attention dropout", "dropout that the candidate does not have"),
        ("broadcast", "dropout with a mask of shape (4, 1, 16)"),
    ],
)
def test_other_masks_are_named(reference, weights, mistake, text):
    comparison = compare(reference, (port(mistake), weights), INPUTS, dropout=True)
    assert comparison.verdict == "different"
    assert text in str(comparison.forward.defects[0])


def test_a_missing_scale_is_found_at_its_line(reference, weights):
    comparison = compare(reference, (port("scale"), weights), INPUTS, dropout=True)
    lines, first = inspect.getsourcelines(port)
    number = next(i for i, line in enumerate(lines) if "scale=mistake" in line) + first
    (defect,) = comparison.forward.defects
    assert f"training/test_dropout_masks.py:{number}" in (
        *defect.repair.operation.lines,
        *defect.lines,
    )


def test_modules_of_nnx_draw_by_their_own_rngs():
    class Port(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.4, rngs=nnx.Rngs(dropout=1))

        def __call__(self, x):
            return self.dropout(self.linear(x)) ** 2

    class Reference(nn.Module):
        def __init__(self, port):
            super().__init__()
            self.linear, self.dropout = nn.Linear(6, 8), nn.Dropout(0.4)
            self.load_state_dict(
                {
                    "linear.weight": torch.tensor(np.array(port.linear.kernel[...])).T,
                    "linear.bias": torch.tensor(np.array(port.linear.bias[...])),
                }
            )

        def forward(self, x):
            return self.dropout(self.linear(x)) ** 2

    candidate = Port()
    comparison = compare(Reference(candidate).train(), candidate, (INPUTS[0][..., :6],), gradients=True, dropout=True)
    assert comparison.verdict == "equal", str(comparison)
    assert comparison.forward.weights.ok


def test_attention_of_linen_draws_one_mask_for_all_rows_unless_told_otherwise(reference):
    def model(broadcast):
        attention = linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=RATE, broadcast_dropout=broadcast, deterministic=False
        )
        variables = attention.init(jax.random.key(0), INPUTS[0])
        return lambda p, x: attention.apply(p, x, rngs={"dropout": jax.random.key(1)}), variables

    equal = compare(model(False), model(False), INPUTS, dropout=True)
    assert equal.verdict == "equal"
    different = compare(model(False), model(True), INPUTS, dropout=True)
    assert "mask of shape (1, 1, 12, 12)" in str(different.forward.defects[0])


def test_random_numbers_of_other_kinds_are_refused(reference, weights):
    def noisy(p, x):
        return port()(p, x) + jax.random.permutation(jax.random.key(0), x)

    with pytest.raises(CaptureError, match="only dropout masks"):
        compare(reference, (noisy, weights), INPUTS, dropout=True)


def test_models_without_dropout_are_told_so(reference, weights):
    model = nn.Linear(16, 4)
    with pytest.raises(CaptureError, match="neither model applies dropout"):
        compare(model, model, INPUTS, dropout=True)
