"""Correct ports whose code computes some constants in float32, whatever the weights: equal but for these constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from twinax.compare.repair.diagnosis import diagnose

WIDTH, HEADS, LAYERS, VOCAB = 16, 2, 1, 31
HEAD = WIDTH // HEADS


class Rotary(nn.Module):
    """A decoder whose frequencies are float32, as in most published ones."""

    def __init__(self, std):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, ids):
        x = self.embed(ids)
        phase = torch.outer(torch.arange(ids.shape[1], dtype=x.dtype), self.inv_freq).tile(1, 2)

        def turned(t):
            return t * phase.cos() + torch.cat((-t[..., HEAD // 2 :], t[..., : HEAD // 2]), -1) * phase.sin()

        for qkv, out, norm in zip(self.qkv, self.out, self.norm, strict=True):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
            weights = (turned(q) @ turned(k).transpose(-1, -2) * HEAD**-0.5).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
        return nn.functional.gelu(x @ self.embed.weight.T)


def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


SCALE = np.float32(HEAD**-0.5)


def port(p, ids, scale=SCALE, approximate=False):
    x = p["embed.weight"][ids]
    phase = jnp.outer(jnp.arange(ids.shape[1]), 1 / 10000 ** (jnp.arange(0, HEAD, 2) / HEAD))
    phase = jnp.tile(phase, (1, 2))

    def turned(t):
        half = jnp.concatenate((-t[..., HEAD // 2 :], t[..., : HEAD // 2]), -1)
        return t * jnp.cos(phase) + half * jnp.sin(phase)

    for i in range(LAYERS):
        y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        y = linear(p, f"qkv.{i}", y * p[f"norm.{i}.weight"] + p[f"norm.{i}.bias"])
        q, k, v = y.reshape(*ids.shape, 3, HEADS, HEAD).transpose(2, 0, 3, 1, 4)
        mixed = jax.nn.softmax(turned(q) @ turned(k).swapaxes(-1, -2) * scale, -1) @ v
        x = x + linear(p, f"out.{i}", mixed.swapaxes(1, 2).reshape(x.shape))
    return jax.nn.gelu(x @ p["embed.weight"].T, approximate=approximate)


def compared(seed, std, **settings):
    torch.manual_seed(seed)
    reference = Rotary(std).eval()
    weights = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    ids = np.random.default_rng(seed).integers(0, VOCAB, (2, 11))
    return diagnose(reference, (lambda p, x: port(p, x, **settings), weights), (ids,))


@pytest.mark.parametrize(("seed", "std"), [(0, 0.5), (2, 1.0)])
def test_constants_in_float32_are_the_only_thing_named(seed, std):
    diagnosis = compared(seed, std)
    assert (diagnosis.verdict, diagnosis.defects) == ("equal but for float32 constants", ())
    assert all("rounded to float32" in str(rounding.repair) for rounding in diagnosis.roundings)


def test_a_mistake_beside_them_is_the_only_defect():
    diagnosis = compared(1, 1.0, approximate=True)
    assert diagnosis.verdict == "different"
    assert [str(defect.repair) for defect in diagnosis.defects] == ["should be erf gelu"]


@pytest.mark.parametrize("factor", [1 + 1e-5])
def test_a_scale_that_is_wrong_by_more_than_rounding_is_different(factor):
    assert compared(0, 1.0, scale=HEAD**-0.5 * factor).verdict == "different"


@pytest.mark.parametrize(("size", "verdict"), [(0.0, "equal but for float32 constants"), (1.7e-7, "different")])
def test_a_difference_larger_than_its_constant_makes_is_not_explained_by_it(size, verdict):
    """Of float32's size, but more than the constant's rounding, and nothing repairs it."""
    weights = {"w": np.random.default_rng(0).standard_normal((6, 6))}
    x = np.random.default_rng(1).standard_normal((4, 6))
    largest = np.abs(x @ weights["w"] / 7**0.5).max()

    def exact(p, x):
        return x @ p["w"] / 7**0.5

    def rounded(p, x):
        y = x @ p["w"]
        return y / np.float32(7**0.5) + size * largest * jnp.sign(jnp.sin(37 * y + jnp.cos(11 * y)))

    assert diagnose((exact, weights), (rounded, weights), (x,)).verdict == verdict
