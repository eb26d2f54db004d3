"""Modules that a port leaves out or takes for another one: named in the code that should use them."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from twinax.compare.repair.diagnosis import diagnose

D, LAYERS = 8, 2
X = np.random.default_rng(0).standard_normal((3, 5, D))


class Reference(nn.Module):
    """Layers of a gated attention with a norm of its queries, rotated by angles, and a final norm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(D, D) for name in ("q", "k", "v")} | {"norm": nn.LayerNorm(D)})
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        angles = torch.arange(5, dtype=x.dtype)[:, None] * 0.3 ** torch.arange(D, dtype=x.dtype)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            q, k = layer["norm"](layer["q"](x)), layer["k"](x)
            q, k = (a * cos + torch.cat((-a[..., D // 2 :], a[..., : D // 2]), -1) * sin for a in (q, k))
            x = x + torch.softmax(q @ k.mT, -1) @ layer["v"](x)
        return self.norm(x)


class Layer(nnx.Module):
    """A layer of the candidate."""

    def __init__(self, rngs, wrong):
        self.q, self.k, self.v = (nnx.Linear(D, D, rngs=rngs) for _ in range(3))
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.wrong = wrong

    def __call__(self, x, cos, sin):
        k = self.k(x)
        q = self.k(x) if self.wrong == "k for q" else self.q(x)  # the queries
        q = q if self.wrong == "norm of queries" else self.norm(q)
        q, k = rotated(q, cos, sin, self.wrong == "sign"), rotated(k, cos, sin, self.wrong == "sign")
        return x + jax.nn.softmax(q @ k.mT) @ self.v(x)


def rotated(a, cos, sin, without_sign):
    one = a[..., : D // 2]
    other = a[..., D // 2 :]
    if without_sign:
        return a * cos + jnp.concatenate((other, one), -1) * sin
    return a * cos + jnp.concatenate((-other, one), -1) * sin


class Candidate(nnx.Module):
    """The port."""

    def __init__(self, rngs, wrong=""):
        self.layers = nnx.List([Layer(rngs, wrong) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.angles = jnp.arange(5.0)[:, None] * 0.3 ** jnp.arange(D)  # no variable
        self.wrong = wrong

    def __call__(self, x):
        cos = jnp.cos(self.angles)
        sin = jnp.cos(self.angles) if self.wrong == "cos for sin" else jnp.sin(self.angles)  # the sine
        for layer in self.layers:
            x = layer(x, cos, sin)  # the last layer's
        return x if self.wrong == "final norm" else self.norm(x)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(1)
    module = Reference().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


def port(module, wrong):
    model = Candidate(nnx.Rngs(0), wrong)
    names = {"kernel": "weight", "scale": "weight", "bias": "bias"}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    values = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    for path, variable in flat:
        *owner, name = map(str, path)
        value = values[".".join([*owner, names[name]])]
        variable.set_value(jnp.asarray(value.T if name == "kernel" else value))
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def line_of(owner, text):
    lines, start = inspect.getsourcelines(owner)
    (number,) = (i for i, line in enumerate(lines, start) if text in line)
    return f"repair/{__file__.rpartition('/')[2]}:{number}"


@pytest.mark.parametrize(
    ("wrong", "owner", "text", "repair"),
    [
        ("norm of queries", Layer, "# the queries", "missing: native_layer_norm"),
        ("final norm", Candidate, "# the last layer's", "missing: native_layer_norm"),
        ("k for q", Layer, "# the queries", "layers.0.k should be layers.0.q"),
        ("cos for sin", Candidate, "# the sine", "cos → sin"),
        ("sign", rotated, "(other, one)", "missing: negative"),
    ],
)
def test_is_named_where_it_is_used(state, wrong, owner, text, repair):
    diagnosis = diagnose(state, port(state, wrong), (X,))
    assert diagnosis.verdict == "different"
    first = diagnosis.defects[0]
    assert first.lines == (line_of(owner, text),)
    assert str(first.repair).startswith(repair)


def test_the_correct_port_is_equal(state):
    assert diagnose(state, port(state, ""), (X,)).verdict == "equal"


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def blocks(p, x):
    x = x @ p["0.c"]
    for i in range(LAYERS):
        x = x + torch.tanh(rms(x) @ p[f"{i}.a"]) @ p[f"{i}.b"]
        x = x + torch.relu(rms(x) @ p[f"{i}.c"]) @ p[f"{i}.b"]
    return rms(x) @ p["0.a"]


def ported(p, x):
    def norm(x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    x = x @ p["0.c"]
    for i in range(LAYERS):
        h = jnp.tanh(x @ p[f"{i}.a"])  # without its norm
        x = x + h @ p[f"{i}.b"]
        x = x + jax.nn.relu(norm(x) @ p[f"{i}.c"]) @ p[f"{i}.b"]
    return norm(x) @ p["0.a"]


def test_a_norm_in_single_operations_is_one_missing_step_in_each_layer():
    """Its squares and means are also those of later norms, once these have the first one's input."""
    rng = np.random.default_rng(0)
    arrays = {f"{i}.{name}": rng.standard_normal((D, D)) for i in range(LAYERS) for name in "abc"}
    reference = blocks, {name: torch.from_numpy(array) for name, array in arrays.items()}
    diagnosis = diagnose(reference, (ported, arrays), (X,))
    assert [defect.lines for defect in diagnosis.defects] == [(line_of(ported, "# without its norm"),)] * LAYERS


def test_an_output_that_is_another_parameter():
    """Its region has no operation, in which a module could stand in another's place."""
    arrays = {f"{name}.{kind}": X[i, :, 0] * (1 + j) for i, name in enumerate("ab") for j, kind in enumerate("wv")}
    reference = (
        (lambda p, x: (x.sum() * p["a.w"] + p["b.w"], p["b.w"])),
        {n: torch.tensor(a) for n, a in arrays.items()},
    )
    diagnosis = diagnose(reference, (lambda p, x: (x.sum() * p["a.w"] + p["b.w"], p["a.w"]), arrays), (X,))
    assert diagnosis.verdict == "different"
