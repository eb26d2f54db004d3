"""Parity for unusual batches: ragged, inner or full padding, one token, huge attention scores."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from twinax import TransformerConfig
from twinax.parity.functions import Batch, flax_function, random_arrays, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import CRITERIA, rung_of

SMALL = TransformerConfig(
    src_vocab_size=11,
    tgt_vocab_size=13,
    d_model=6,
    num_heads=3,
    head_dim=5,
    d_ff=7,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=8,
    norm_placement="pre",
    param_dtype="float64",
    compute_dtype="float64",
)
CONFIGS = {
    "pre-norm, exact mask": SMALL,
    "post-norm, filled mask": SMALL.replace(norm_placement="post", mask_value=-1e9, score_scaling="query"),
}
# ((B, S, T), explicit masks): each shape compiles once per config; the second config has the other masks.
SHAPES = [((2, 1, 1), "src"), ((3, 5, 2), "both"), ((2, 2, 7), "neither"), ((3, 8, 8), "tgt")]
OTHER_SHAPES = [((2, 1, 1), "neither"), ((3, 8, 8), "both")]
LARGEST_SCORE = 1e3


@lru_cache
def arrays_and_scale(name):
    """Random arrays, and the factor on the queries that makes the largest score of random sentences 100."""
    config = CONFIGS[name]
    arrays = random_arrays(config, seed=3)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 11, (64, 8)), rng.integers(0, 13, (64, 8))
    outputs = torch_function(config, gradients=False)(arrays, Batch(*tokens, tokens[1]))
    return arrays, 100 / largest_score(outputs)


def largest_score(outputs):
    return max(np.abs(np.asarray(value)).max() for path, value in outputs.items() if path.endswith(".scores"))


def scaled_queries(arrays, factor):
    return {name: a * factor if ".q_proj." in name else a for name, a in arrays.items()}


@st.composite
def batches(draw, shapes):
    (batch, src_length, tgt_length), mask_sides = draw(st.sampled_from(shapes))
    masks = [
        draw(hnp.arrays(bool, (batch, length))) if mask_sides in (side, "both") else None
        for side, length in (("src", src_length), ("tgt", tgt_length))
    ]
    src, tgt, labels = (
        draw(hnp.arrays(np.int64, (batch, length), elements=st.integers(0, vocab - 1)))
        for length, vocab in ((src_length, 11), (tgt_length, 13), (tgt_length, 13))
    )
    for tokens in (src, labels):
        if draw(st.booleans()):  # padding at the end, up to the whole row
            lengths = draw(hnp.arrays(np.int64, (batch, 1), elements=st.integers(0, tokens.shape[1])))
            tokens[np.arange(tokens.shape[1]) >= lengths] = 0
    return Batch(src, tgt, labels, *masks)


@pytest.mark.parametrize(("name", "shapes"), list(zip(CONFIGS, (SHAPES, OTHER_SHAPES), strict=True)), ids=list(CONFIGS))
@settings(max_examples=16)
@given(data=st.data(), strength=st.sampled_from([0, 0.01, 1, 9]))
def test_contents(name, shapes, data, strength):
    config, batch = CONFIGS[name], data.draw(batches(shapes))
    arrays, scale = arrays_and_scale(name)
    arrays = scaled_queries(arrays, strength * scale)
    outputs = torch_function(config)(arrays, batch)
    assert largest_score(outputs) <= LARGEST_SCORE
    compare_arrays(outputs, flax_function(config)(arrays, batch), criteria=CRITERIA, rung_of=rung_of).check()


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_reach_the_stated_size(name):
    config = CONFIGS[name]
    arrays, scale = arrays_and_scale(name)
    rng = np.random.default_rng(3)
    batch = Batch(rng.integers(0, 11, (64, 8)), rng.integers(0, 13, (64, 8)), rng.integers(0, 13, (64, 8)))
    outputs = torch_function(config, gradients=False)(scaled_queries(arrays, 9 * scale), batch)
    assert 800 < largest_score(outputs) <= LARGEST_SCORE


def test_fully_masked_rows_have_zero_weights_and_no_influence():
    src, tgt = np.array([[0, 0, 0], [4, 5, 0]]), np.array([[3, 4], [3, 4]])
    arrays, _ = arrays_and_scale("pre-norm, exact mask")
    for function in (torch_function(SMALL), flax_function(SMALL)):
        outputs = {path: np.asarray(value) for path, value in function(arrays, Batch(src, tgt, tgt)).items()}
        weights = outputs["decoder.layers.0.cross_attention.weights"]
        assert (weights[0] == 0).all()
        assert np.allclose(weights[1].sum(-1), 1)
        heads_without_value = outputs["decoder.layers.0.cross_attention.output"][0]
        assert np.array_equal(heads_without_value, np.broadcast_to(arrays_bias(arrays), heads_without_value.shape))
        assert all(np.isfinite(value).all() for value in outputs.values())


def arrays_bias(arrays):
    return arrays["decoder.layers.0.cross_attention.out_proj.bias"]


def test_a_finite_fill_spreads_a_fully_masked_row_evenly():
    config = CONFIGS["post-norm, filled mask"]
    arrays, _ = arrays_and_scale("post-norm, filled mask")
    src, tgt = np.array([[0, 0, 0]]), np.array([[3, 4]])
    for function in (torch_function(config, gradients=False), flax_function(config, gradients=False)):
        weights = np.asarray(function(arrays, Batch(src, tgt, tgt))["decoder.layers.0.cross_attention.weights"])
        assert np.allclose(weights, 1 / 3, atol=1e-15)
