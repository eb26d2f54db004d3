"""The line at which a missing activation or norm is named, by where the reference has it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from twinax.compare.repair.diagnosis import diagnose

D = 8
X = np.random.default_rng(0).standard_normal((2, 3, 4, D))


class Norm(nn.Module):
    """Layer normalisation written out, as ports of channels-last models have it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


class Attention(nn.Module):
    """A norm, queries and keys of it, a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        residual = x
        x = self.norm(x)
        q, k = self.q(x), self.k(x)
        return residual + torch.softmax(q @ k.mT, -1) @ k


class Reference(nn.Module):
    """A step of each kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(D, D) for _ in range(3))
        self.norm, self.attention = Norm(), Attention()

    def forward(self, x):
        x = self.first(x) + x
        x = torch.sigmoid(self.norm(x))
        x = torch.tanh(self.second(x)).transpose(1, 2)
        x = self.attention(x)
        return self.last(x)


def layer_norm(scale, bias, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


class PortedAttention(nnx.Module):
    """The same."""

    def __init__(self, rngs, wrong):
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.q, self.k = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.wrong = wrong

    def __call__(self, x):
        residual = x
        if self.wrong != "norm of attention":
            x = self.norm(x)
        q = self.q(x)  # after the norm
        k = self.k(x)
        return residual + jax.nn.softmax(q @ k.mT) @ k


class Port(nnx.Module):
    """The same, without the step that is named."""

    def __init__(self, wrong):
        rngs = nnx.Rngs(0)
        self.first, self.second, self.last = (nnx.Linear(D, D, rngs=rngs) for _ in range(3))
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = PortedAttention(rngs, wrong)
        self.wrong = wrong

    def __call__(self, x):
        x = self.first(x) + x
        norm = layer_norm if self.wrong != "norm" else lambda scale, bias, x: x
        sigmoid = jax.nn.sigmoid if self.wrong != "sigmoid" else lambda x: x
        x = sigmoid(norm(self.norm.scale[...], self.norm.bias[...], x))  # norm and sigmoid
        x = self.second(x)  # tanh
        if self.wrong != "tanh":
            x = jnp.tanh(x)
        x = x.transpose(0, 2, 1, 3)
        x = self.attention(x)
        return self.last(x)


def ported(module, wrong):
    """The port with the module's weights."""
    model = Port(wrong)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    values = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    for path, variable in flat:
        *owner, name = map(str, path)
        value = values[".".join([*owner, "bias" if name == "bias" else "weight"])]
        variable.set_value(jnp.asarray(value.T if name == "kernel" else value))
    nnx.update(model, nnx.from_flat_state(flat))
    return model


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(1)
    module = Reference().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module


@pytest.mark.parametrize(
    ("wrong", "owner", "text"),
    [
        ("sigmoid", Port, "# norm and sigmoid"),  # not within the norm, whose result it takes
        ("norm", Port, "# norm and sigmoid"),  # not where its input is computed
        ("tanh", Port, "# tanh"),  # not after the transposition
        ("norm of attention", PortedAttention, "# after the norm"),  # not where the attention is called
    ],
)
def test_a_missing_step_is_named_where_the_reference_has_it(module, wrong, owner, text):
    diagnosis = diagnose(module, ported(module, wrong), (X,))
    assert diagnosis.verdict == "different"
    lines, start = inspect.getsourcelines(owner)
    (number,) = (i for i, line in enumerate(lines, start) if text in line)
    assert diagnosis.defects[0].lines == (f"repair/{__file__.rpartition('/')[2]}:{number}",)
    assert "missing: " in str(diagnosis.defects[0].repair)


def test_the_correct_port_is_equal(module):
    assert diagnose(module, ported(module, ""), (X,)).verdict == "equal"
