"""The proof detects a less accurate framework and inputs with too little coverage."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax import TransformerConfig
from twinax.parity import ladder
from twinax.parity.coverage import coverage
from twinax.parity.functions import random_arrays, random_batch
from twinax.parity.oracles import published

CONFIG = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)


@pytest.mark.parametrize(("flax", "pytorch", "ratio"), [(2e-6, 1e-6, 2.0), (1e-6, 4e-6, 0.25), (3e-6, 3e-6, 1.0)])
def test_the_ratio_is_flax_over_pytorch(flax, pytorch, ratio):
    """Synthetic errors: the ratio is above 1 if Flax is less accurate, below 1 if PyTorch is."""
    errors, rng = ladder._Errors(), np.random.default_rng(0)
    for _ in range(ladder.POOLED):
        reference = {"logits": rng.normal(size=(30, 10)), "gradients.a.kernel": rng.normal(size=(30, 10))}
        noise = {path: rng.normal(size=array.shape) for path, array in reference.items()}
        errors.add(
            reference,
            *({path: reference[path] + scale * noise[path] for path in reference} for scale in (flax, pytorch)),
        )
    assert errors.ratios() == pytest.approx({"logits": ratio, "gradients": ratio}, rel=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(2, 9), st.integers(2, 9))
def test_random_batches_cover_padding(seed, sentences, src_length, tgt_length):
    batch = random_batch(CONFIG, np.random.default_rng(seed), sentences, src_length, tgt_length)
    assert batch.src_tokens.shape == (sentences, src_length)
    assert coverage(batch, random_arrays(CONFIG, 0), CONFIG.pad_id).gaps == ()
    for side in (batch.src_tokens, batch.tgt_tokens):
        keep = side != CONFIG.pad_id
        assert keep[0].all()
        assert not keep[1].all()
        assert keep.any(1).all()
        assert (np.diff(keep.astype(int), axis=1) <= 0).all()  # padding is at the end


def coverage_with(**changes):
    batch, arrays = random_batch(CONFIG, np.random.default_rng(0), 3, 5, 4), random_arrays(CONFIG, 0)
    return coverage(batch._replace(**changes.pop("batch", {})), {**arrays, **changes.pop("arrays", {})}, CONFIG.pad_id)


FULL = np.full((3, 5), 7)
GAPS = {
    "no padding in sources; sources of one length": {"batch": {"src_tokens": FULL}},
    "no padding in targets; targets of one length": {"batch": {"tgt_tokens": FULL[:, :4]}},
    r"1 of \d+ biases are all 0": {"arrays": {"output.bias": np.zeros(11)}},
    r"1 of \d+ norm scales are all 1": {"arrays": {"decoder.layers.0.self_attention_residual.norm.scale": np.ones(3)}},
}


@pytest.mark.parametrize("gap", GAPS)
def test_inputs_that_cover_too_little_are_refused(gap):
    with pytest.raises(AssertionError, match=f"^the inputs do not cover everything: {gap}$"):
        coverage_with(**GAPS[gap]).check()
    coverage_with().check()


def test_the_ladder_refuses_inputs_without_padding(monkeypatch):
    def unpadded_batch(config, rng, batch, src_length, tgt_length):
        src, tgt = np.full((batch, src_length), 7), np.full((batch, tgt_length), 7)
        return random_batch(config, rng, batch, src_length, tgt_length)._replace(src_tokens=src, tgt_tokens=tgt)

    monkeypatch.setattr(ladder, "random_batch", unpadded_batch)
    with pytest.raises(AssertionError, match=r"no padding in targets; sources of one length; targets of one length$"):
        ladder.run_ladder(CONFIG)
    monkeypatch.setattr(published, "random_batch", unpadded_batch)
    with jax.enable_x64(True), pytest.raises(AssertionError, match="no padding in sources"):
        published.compare_published("annotated_transformer", True)


def test_an_oracle_is_asked_about_padded_rows():
    """All rows with a source token are compared, including padded ones."""
    batch = random_batch(CONFIG, np.random.default_rng(0), 4, 5, 4)
    batch.src_tokens[3] = CONFIG.pad_id
    weights = np.random.default_rng(1).random((4, 2, 4, 5))
    outputs = {"a.weights": weights, "logits": np.zeros((4, 4, 3)), "more": np.ones(2)}
    expected = {"a.weights": weights, "logits": np.zeros((4, 4, 3))}
    comparison = ladder.comparable(outputs, expected, batch, CONFIG.pad_id)
    assert comparison.keys() == expected.keys()
    assert np.array_equal(comparison["a.weights"], weights[:3])
    assert comparison["logits"].shape[0] == 4
    padded = int(np.flatnonzero((batch.src_tokens == CONFIG.pad_id).any(1))[0])
    for row in range(3):
        candidate = {**outputs, "a.weights": weights + (np.arange(4) == row)[:, None, None, None] * 1e-6}
        reports = ladder.compare_with_oracle({"Flax": candidate}, expected, batch, CONFIG.pad_id)
        assert not reports["Flax"].ok
    assert padded < 3
