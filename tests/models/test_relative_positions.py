"""Relative positions against T5's: buckets of distances, and the biases of both twins."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from twinax import TransformerConfig, flax_transformer, torch_reference
from twinax.formulas.relative_positions import relative_position_buckets

LONGEST = 5000


def t5_buckets(num_buckets, max_distance, bidirectional):
    distances = torch.arange(-LONGEST, LONGEST + 1)
    return T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance).numpy()


def buckets(num_buckets, max_distance, bidirectional):
    """The twins' buckets: distances beyond the table have its last ones."""
    distances = np.clip(np.arange(-LONGEST, LONGEST + 1), -max_distance, max_distance)
    return relative_position_buckets(num_buckets, max_distance, bidirectional)[distances + max_distance]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 256), (64, 128), (64, 512), (4, 3), (7, 20), (128, 4096)]
)
def test_buckets_are_t5_s(num_buckets, max_distance, bidirectional):
    expected = t5_buckets(num_buckets, max_distance, bidirectional)
    assert np.array_equal(buckets(num_buckets, max_distance, bidirectional), expected)


@given(num_buckets=st.integers(4, 128), ratio=st.floats(1.01, 40), bidirectional=st.booleans())
def test_buckets_are_t5_s_but_for_its_rounding(num_buckets, ratio, bidirectional):
    """T5 takes float32 logarithms, so it may round a distance on the border of two buckets to the other one."""
    max_distance = max(num_buckets // 2 + 1, int(ratio * num_buckets))
    actual, expected = (f(num_buckets, max_distance, bidirectional) for f in (buckets, t5_buckets))
    per_side = num_buckets // 2 if bidirectional else num_buckets
    exact = per_side // 2
    for distance in np.abs(np.flatnonzero(actual != expected) - LONGEST):
        bucket = (per_side - exact) * math.log(distance / exact) / math.log(max_distance / exact)
        assert abs(bucket - round(bucket)) < 1e-5


@pytest.mark.parametrize("bidirectional", [True, False])
def test_biases_are_t5_s(bidirectional):
    config = TransformerConfig.preset("tiny", param_dtype="float64", compute_dtype="float64")
    sizes = {"d_model": config.d_model, "num_heads": 3, "is_decoder": not bidirectional}
    oracle = T5Attention(T5Config(**sizes), has_relative_attention_bias=True, layer_idx=0).double()
    torch.nn.init.normal_(oracle.relative_attention_bias.weight, generator=torch.Generator().manual_seed(0))
    weight = oracle.relative_attention_bias.weight.detach()
    expected = oracle.compute_bias(150, 170).detach()

    distances = np.arange(170)[None] - np.arange(150)[:, None]
    module = torch_reference.layers.RelativePositions(config, 3, bidirectional=bidirectional)
    module.weight.data.copy_(weight)
    assert torch.equal(module(torch.from_numpy(distances)), expected)
    if bidirectional:  # Flax compiles each, and has the same buckets
        return
    flax = flax_transformer.layers.RelativePositions(config, 3, bidirectional=bidirectional, rngs=nnx.Rngs(0))
    flax.embedding.set_value(jnp.asarray(weight))
    assert np.array_equal(flax(jnp.asarray(distances)), expected)
