"""Diagnosis of mistakes in tables of positions, which the reference computes otherwise, and of misplaced values."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from twinax.compare.capture.models import capture
from twinax.compare.matching.matching import ROUNDED, Matches, Side
from twinax.compare.matching.uses import with_uses
from twinax.compare.repair.diagnosis import diagnose
from twinax.compare.repair.state import State
from twinax.compare.repair.tables import in_tables

HALF, HEADS, WIDTH, THETA = 3, 2, 12, 100.0
TOKENS = np.random.default_rng(0).integers(1, 9, (2, 5))


class Attention(nn.Module):
    """Rotary attention whose tables have no batch axis, and every number twice."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(0, 2 * HALF, 2) / (2 * HALF))
        sin, cos = (torch.cat((f(angles), f(angles)), -1)[None, None] for f in (torch.sin, torch.cos))
        q, k, v = (f(x).view(*x.shape[:2], HEADS, 2 * HALF).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (y * cos + torch.cat((-y[..., HALF:], y[..., :HALF]), -1) * sin for y in (q, k))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(2 * HALF)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Reference(nn.Module):
    """Two residual attentions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Port(nnx.Module):
    """The attention with one mistake."""

    def __init__(self, mistake):
        self.q, self.k, self.v, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4))
        self.mistake = mistake

    def __call__(self, x, segments):
        sin, cos = self.tables(segments)
        q = self.q(x)
        if self.mistake == "k for q":
            q = self.k(x)  # k for q
        q, k, v = (y.reshape(*x.shape[:2], HEADS, 2 * HALF) for y in (q, self.k(x), self.v(x)))
        q, k = (self.rotated(y, sin, cos) for y in (q, k))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2 * HALF))
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

    def tables(self, segments):
        start, steps = jnp.argmax(segments != 0, axis=1)[:, None], jnp.arange(segments.shape[1])[None]
        positions = steps - start
        if self.mistake == "positions":
            positions = start - steps  # positions
        fraction = jnp.arange(0, 2 * HALF, 2) / (2 * HALF)
        if self.mistake == "fraction":
            fraction = (2 * HALF) / jnp.arange(0, 2 * HALF, 2)  # fraction
        angles = positions[..., None] / THETA**fraction
        if self.mistake == "sine":
            return jnp.cos(angles), jnp.cos(angles)  # sine
        return jnp.sin(angles), jnp.cos(angles)

    def rotated(self, y, sin, cos):
        one, other = jnp.split(y, 2, -1)
        sin, cos = sin[:, :, None], cos[:, :, None]
        return jnp.concatenate((one * cos - other * sin, other * cos + one * sin), -1)


class Candidate(nnx.Module):
    """The port with one mistake in its attentions."""

    def __init__(self, mistake):
        self.embedding = nnx.Embed(9, WIDTH, rngs=nnx.Rngs(0))
        self.layers = nnx.List([Port(mistake) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, tokens)
        return x


def pair(mistake):
    torch.manual_seed(0)
    reference, candidate = Reference().eval(), Candidate(mistake)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.5)
    candidate.embedding.embedding[...] = jnp.asarray(reference.embedding.weight.detach().numpy())
    for layer, other in zip(reference.layers, candidate.layers, strict=True):
        for name in ("q", "k", "v", "out"):
            linear, port = getattr(layer, name), getattr(other, name)
            port.kernel[...] = jnp.asarray(linear.weight.detach().numpy().T)
            port.bias[...] = jnp.asarray(linear.bias.detach().numpy())
    return reference, candidate


REPAIRS = {
    "positions": {"sub: inputs 1 and 2 swapped", "sub: negated"},
    "fraction": {"div: operands swapped"},
    "sine": {"cos → sin"},
    "k for q": {"layers.0.k should be layers.0.q", "layers.1.k should be layers.1.q"},
}


@pytest.mark.parametrize("mistake", REPAIRS)
def test_a_mistake_is_found_at_its_line(mistake):
    """No value before the rotated queries has the size of one of the reference's."""
    diagnosis = diagnose(*pair(mistake), (TOKENS,))
    lines, start = inspect.getsourcelines(Port)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mistake}"))
    assert (diagnosis.verdict, diagnosis.verified) == ("different", True)
    for defect in diagnosis.defects:
        assert str(defect.repair) in REPAIRS[mistake]
        assert defect.lines[0] == f"repair/test_compared_tables.py:{line}"


def test_the_correct_port_is_equal():
    assert diagnose(*pair(""), (TOKENS,)).verdict.startswith("equal")


@np.errstate(all="ignore")
@pytest.mark.parametrize("mistake", ["positions", "fraction", "sine", "k for q"])
def test_what_matches_after_a_change_decides(mistake):
    """The search in the tables alone, without any region of values that differ."""
    reference, candidate = pair(mistake)
    traces = capture(reference, (TOKENS,)), with_uses(capture(candidate, (TOKENS,)))
    sides = Side(traces[0]), Side(traces[1])
    found = in_tables(State(*sides, Matches(*sides, ROUNDED)))
    assert (found is None) == (mistake == "k for q")
    if found is not None:
        assert str(found[1].repair) in REPAIRS[mistake]
        assert mistake == "sine" or not found[2].open_outputs  # one of two on a line, in one layer


@np.errstate(all="ignore")
def test_a_comparison_is_likelier_wrong_than_a_number():
    """k < q + 1 is k <= q too; then the comparison is meant, and not the 0 that is added before it."""

    def port(p, x, tokens):
        places = jnp.arange(tokens.shape[1])
        mask = places[None] < places[:, None] + 0  # not <=
        return jnp.where(mask, x @ x.T, -1e9) @ p["w"]

    def reference(p, x, tokens):
        scores = (x @ x.T).masked_fill(~torch.ones(5, 5).tril().bool(), -1e9)
        return scores @ p["w"]

    w = np.random.default_rng(0).standard_normal((5, 3))
    inputs = np.random.default_rng(1).standard_normal((5, 4)), TOKENS
    traces = capture((reference, {"w": torch.from_numpy(w)}), inputs), capture((port, {"w": w}), inputs)
    sides = Side(traces[0]), Side(with_uses(traces[1]))
    found = in_tables(State(*sides, Matches(*sides, ROUNDED)))
    assert found is not None
    assert str(found[1].repair) == "lt → <="


class Linear(nnx.Module):
    """A linear map of the port's own."""

    def __init__(self, width, seed):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (width, width)))

    def __call__(self, x):
        return x @ self.kernel[...]


class Gate(nnx.Module):
    """A gated feed-forward network, whose gate may be left out."""

    def __init__(self, width):
        self.gate, self.up, self.down = (Linear(width, seed) for seed in range(3))
        self.gated = True

    def __call__(self, x):
        gate = jax.nn.silu(self.gate(x))
        up = self.up(x)
        inner = gate * up if self.gated else up
        return self.down(inner)  # where the product is missing


def test_a_factor_that_is_left_out_is_named_where_both_are_known():
    """And not in the layer that computes the other one."""
    reference, candidate = Gate(6), Gate(6)
    candidate.gated = False
    diagnosis = diagnose(reference, candidate, (np.random.default_rng(0).standard_normal((3, 6)),))
    (defect,) = diagnosis.defects
    lines, start = inspect.getsourcelines(Gate)
    assert str(defect.repair) == "missing: * a value of the reference"
    assert defect.lines[0] == f"repair/test_compared_tables.py:{start + len(lines) - 1}"
