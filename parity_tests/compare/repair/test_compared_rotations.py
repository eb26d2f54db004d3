"""Rotary embeddings of `transformers`, in both of their forms, against a port in the other form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_neighbors
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from twinax.parity import diagnose

pytestmark = pytest.mark.newest
LENGTH, HEADS, WIDTH = 5, 3, 6
BASE = 100.0  # so small that float32 frequencies change the outputs
X = np.random.default_rng(0).standard_normal((2, LENGTH, HEADS * WIDTH))


class Reference(nn.Module):
    """Attention scores of rotated queries and keys; frequencies in `dtype`."""

    def __init__(self, halves, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.k = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH, dtype=torch.float64) for _ in range(2))
        self.halves = halves
        self.frequencies = (BASE ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)).to(dtype)

    def forward(self, x):
        q, k = (f(x).view(*x.shape[:2], HEADS, WIDTH) for f in (self.q, self.k))
        angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * self.frequencies.to(torch.float64)
        if self.halves:
            angles = torch.cat([angles, angles], -1)[None]
            q, k = rotate_halves(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
        else:
            q, k = (rotate_neighbors(y, angles.sin()[None], angles.cos()[None]) for y in (q, k))
        return torch.einsum("blhd,bmhd->bhlm", q, k)


class Attention(Reference):
    """A mixture of the inputs, with these scores."""

    def forward(self, x):
        weights = torch.softmax(super().forward(x) / WIDTH**0.5, -1)
        return torch.einsum("bhlm,bmd->bhld", weights, x)


def port(halves):
    def rotated(x):
        angles = jnp.arange(LENGTH)[:, None, None] * BASE ** (-jnp.arange(0, WIDTH, 2) / WIDTH)
        one, other = jnp.split(x, 2, -1) if halves else (x[..., ::2], x[..., 1::2])
        parts = one * jnp.cos(angles) - other * jnp.sin(angles), other * jnp.cos(angles) + one * jnp.sin(angles)
        return jnp.concatenate(parts, -1) if halves else jnp.stack(parts, -1).reshape(x.shape)

    def scores(p, x):
        q, k = ((x @ p[f"{n}.weight"].T + p[f"{n}.bias"]).reshape(*x.shape[:2], HEADS, WIDTH) for n in "qk")
        return jnp.einsum("blhd,bmhd->bhlm", rotated(q), rotated(k))

    return scores


def attention_port(halves):
    scores = port(halves)
    return lambda p, x: jnp.einsum("bhlm,bmd->bhld", jax.nn.softmax(scores(p, x) / WIDTH**0.5), x)


def compared(reference, port):
    weights = {name: parameter.detach().numpy() for name, parameter in reference.named_parameters()}
    return diagnose(reference.eval(), (port, weights), (X,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("own", "other", "halves"), [("neighbors", "halves", True), ("halves", "neighbors", False)])
def test_pairs_of_other_elements_are_one_repair(own, other, halves, dtype):
    diagnosis = compared(Reference(halves, dtype), port(not halves))
    assert {str(defect.repair).replace(" (", ", ").split(", ")[0] for defect in diagnosis.defects} == {f"rotates {own}"}
    assert all(f"should rotate {other}" in str(defect.repair) for defect in diagnosis.defects)
    assert (len(diagnosis.defects), diagnosis.verified) == (2, True)
    names = [repair.repair.text for repair in diagnosis.roundings]
    assert all("rounded to float32" in name for name in names)
    assert bool(names) == (dtype == torch.float32)  # what is left is named, and is no difference of its own


@pytest.mark.parametrize("halves", [True, False])
def test_the_same_pairs_are_equal(halves):
    assert compared(Reference(halves, torch.float64), port(halves)).verdict == "equal"


@pytest.mark.parametrize("halves", [True, False])
def test_a_rotation_in_attention_is_one_repair(halves):
    """Where the sine of each pair is repeated, as in GPT-J, its arrangements match wherever they are put."""
    diagnosis = compared(Attention(halves, torch.float64), attention_port(not halves))
    assert diagnosis.verified
    assert len(diagnosis.defects) == 2
    assert all(str(defect.repair).startswith("rotates ") for defect in diagnosis.defects)
