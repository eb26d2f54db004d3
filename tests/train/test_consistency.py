"""Consistency training: the papers' formulas by torch's functions, cutoff, and the step of both twins."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from parity_tests.support.trajectories import LOSS_BOUND, PARAMETER_BOUND, InFlax, InPyTorch, TrajectoryCase
from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.configs import ConfigError
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.dropout import SECOND_PASS
from twinax.parity.functions import random_arrays, random_batch
from twinax.torch_reference import consistency as torch_consistency
from twinax.train.step import consistency

MODEL = TransformerConfig.preset(
    "tiny", num_encoder_layers=1, num_decoder_layers=1, attention_dropout=0.1, ffn_dropout=0.1,
    param_dtype="float64", compute_dtype="float64",
)  # fmt: skip
SMOOTHING = 0.1
ROWS = np.arange(6) + 40
KINDS = ("simcut", "r_drop")


def training(kind, **changes):
    return TrainingConfig(label_smoothing=SMOOTHING, consistency=kind, cutoff=0.3, **changes)


@pytest.fixture(scope="module")
def arrays():
    return random_arrays(MODEL, 0)


@pytest.fixture(scope="module")
def twins(arrays):
    flax = flax_transformer.Transformer.from_arrays(MODEL, {n: jnp.asarray(a) for n, a in arrays.items()})
    state_dict = convert.to_state_dict(arrays, MODEL)
    return flax, torch_reference.Transformer.from_state_dict(MODEL, state_dict)


@pytest.fixture(scope="module")
def batch():
    arrays = random_batch(MODEL, np.random.default_rng(3), len(ROWS), 7, 5)
    return arrays.src_tokens, arrays.tgt_tokens, arrays.labels


def in_both(twins, batch, config):
    """The loss of both twins, as (sum, tokens)."""
    flax, reference = twins
    key = flax_transformer.DropoutKey(5, 11, jnp.asarray(ROWS))
    torch_key = torch_reference.DropoutKey(5, 11, torch.from_numpy(ROWS))
    sides = (
        jax.jit(lambda *arrays: consistency.training_loss(flax, *arrays, config))(*map(jnp.asarray, batch), key),
        torch_consistency.training_loss(reference, *map(torch.from_numpy, batch), torch_key, config),
    )
    return [(total.item(), int(tokens)) for total, tokens in sides]


@jax.jit
def divergences_and_gradients(first, second, weights):
    value, pull_back = jax.vjp(consistency.divergences, first, second)
    return value, pull_back(weights)


@given(seed=st.integers(0, 999), scale=st.sampled_from([0.01, 3, 100]))
def test_divergence_is_torch_s(seed, scale):
    """The value, and both gradients: autograd passes through target and input of `kl_div`."""
    first, second = np.random.default_rng(seed).normal(0, scale, (2, 3, 2, 7))
    sides = [torch.from_numpy(logits).requires_grad_() for logits in (first, second)]
    expected = functional.kl_div(sides[1].log_softmax(-1), sides[0].softmax(-1), reduction="none").sum(-1)
    (weights := torch.linspace(-1, 2, 6).double().reshape(3, 2)).mul(expected).sum().backward()
    value, gradients = divergences_and_gradients(first, second, weights.numpy())
    reference = torch_consistency.divergences(torch.from_numpy(first), torch.from_numpy(second))
    for own in (value, reference):
        np.testing.assert_allclose(own, expected.detach(), rtol=1e-12, atol=1e-14)
    for gradient, side in zip(gradients, sides, strict=True):
        np.testing.assert_allclose(gradient, side.grad, rtol=1e-10, atol=1e-14 * max(scale, 1))


def test_divergence_of_a_suppressed_token():
    """A logit of -inf in both predictions adds nothing; in the second alone, the divergence is infinite."""
    first, second = (jnp.asarray(a) for a in np.random.default_rng(0).normal(size=(2, 1, 1, 5)))
    without = consistency.divergences(first[..., :4], second[..., :4])
    lower = jnp.full((1, 1, 1), -jnp.inf)
    both = [jnp.concatenate([a[..., :4], lower], -1) for a in (first, second)]
    assert float(consistency.divergences(*both)[0, 0]) == pytest.approx(float(without[0, 0]), rel=1e-13)
    gradients = jax.grad(lambda a, b: consistency.divergences(a, b).sum(), argnums=(0, 1))(*both)
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    torch_both = [torch.from_numpy(np.array(a)).requires_grad_() for a in both]
    (divergence := torch_consistency.divergences(*torch_both)).sum().backward()
    assert divergence.item() == pytest.approx(float(without[0, 0]), rel=1e-13)
    for own, side in zip(gradients, torch_both, strict=True):
        np.testing.assert_allclose(own, side.grad, rtol=1e-10, atol=1e-14)
    assert jnp.isinf(consistency.divergences(first, both[1])[0, 0])


def by_the_papers(reference, batch, kind, weight):
    """The loss of the papers from the logits of two forward passes, with torch's own functions."""
    src, tgt, labels = map(torch.from_numpy, batch)
    cutoff = 0.3 if kind == "simcut" else None
    keys = [
        torch_reference.DropoutKey(5, 11, torch.from_numpy(ROWS)),
        torch_reference.DropoutKey(5, 11, torch.from_numpy(ROWS) + SECOND_PASS, cutoff),
    ]
    logits = [reference(src, tgt, dropout_key=key).flatten(0, 1) for key in keys]
    keep = (labels != MODEL.pad_id).flatten()
    p, q = (z.log_softmax(-1)[keep] for z in logits)
    cross_entropies = [
        functional.cross_entropy(z[keep], labels.flatten()[keep], label_smoothing=SMOOTHING, reduction="sum")
        for z in logits
    ]
    forward = functional.kl_div(q, p, log_target=True, reduction="sum")
    backward = functional.kl_div(p, q, log_target=True, reduction="sum")
    if kind == "simcut":
        return (cross_entropies[0] + weight * forward).item()
    return (sum(cross_entropies) + weight * (forward + backward) / 2).item()


@pytest.mark.parametrize(("kind", "weight"), [("simcut", None), ("r_drop", None), ("r_drop", 0.7)])
def test_loss_is_the_papers(twins, batch, kind, weight):
    expected = by_the_papers(twins[1], batch, kind, weight or {"simcut": 3.0, "r_drop": 5.0}[kind])
    for total, tokens in in_both(twins, batch, training(kind, consistency_weight=weight)):
        assert total == pytest.approx(expected, rel=1e-12)
        assert tokens == (batch[2] != MODEL.pad_id).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_same_in_both_frameworks(kind):
    """After three updates in float64; the masks of a sentence do not depend on its micro-batch."""
    settings = {"clip_norm": 1.0, "warmup_updates": 10, "learning_rate": 2.0}
    case = TrajectoryCase(MODEL, training(kind, **settings, accumulation=3))
    whole = InFlax(replace(case, training=training(kind, **settings)))
    flax = InFlax(case)
    reference = InPyTorch(case, flax.state)
    losses = np.array([[run.update(number) for run in (flax, reference, whole)] for number in range(3)])
    assert np.ptp(losses, axis=1).max() < LOSS_BOUND
    differences = [
        np.abs(np.asarray(flax.state.params[name]) - np.asarray(array)).max()
        for name, array in whole.state.params.items()
    ]
    assert max(differences) < PARAMETER_BOUND
    plain = InFlax(replace(case, training=TrainingConfig(label_smoothing=SMOOTHING, **settings)))
    assert abs(plain.update(0) - losses[0, 0]) > 1e-2  # or the comparison is empty


def embedded(config, tokens, cutoff, rows, seed=0):
    """Token embeddings of ones after cutoff, in both frameworks."""
    x = np.ones((*tokens.shape, 2), np.float32)
    flax = flax_transformer.Transformer.abstract(config).src_cutoff
    torch_model = torch_reference.Transformer(config)
    key = flax_transformer.DropoutKey(seed, 3, jnp.asarray(rows), cutoff)
    torch_key = torch_reference.DropoutKey(seed, 3, torch.from_numpy(rows), cutoff)
    return (
        np.asarray(flax(jnp.asarray(x), jnp.asarray(tokens), key)),
        torch_model.src_cutoff(torch.from_numpy(x), torch.from_numpy(tokens), torch_key).numpy(),
    )


def test_cutoff_is_of_whole_tokens_in_second_passes():
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 100, (400, 30))
    rows = np.arange(400) + SECOND_PASS * (np.arange(400) % 2)
    special = rng.random(tokens.shape) < 0.3
    tokens[special] = rng.choice([MODEL.pad_id, MODEL.bos_id, MODEL.eos_id], special.sum())
    flax, reference = embedded(MODEL, tokens, 0.2, rows)
    np.testing.assert_array_equal(flax, reference)
    np.testing.assert_array_equal(flax[..., 0], flax[..., 1])
    zero = flax[..., 0] == 0
    assert not zero[::2].any()
    assert not zero[special].any()
    assert zero[1::2][~special[1::2]].mean() == pytest.approx(0.2, abs=0.02)
    other, _ = embedded(MODEL, tokens, 0.2, rows, seed=1)
    assert (other != flax).any()


def test_cutoff_is_a_zero_embedding(twins, batch, arrays):
    """Against a model without dropout, where each cut token is replaced by one whose embedding is zero."""
    config = MODEL.replace(
        embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0, decoder_start_id=1
    )
    zero_id = 90
    tables = {name: np.array(arrays[f"{name}.embedding"]) for name in ("src_embedding", "tgt_embedding")}
    for table in tables.values():
        table[zero_id] = 0
    changed = {**arrays, **{f"{name}.embedding": table for name, table in tables.items()}}
    model = flax_transformer.Transformer.from_arrays(config, {n: jnp.asarray(a) for n, a in changed.items()})
    src, tgt = (np.where(tokens == zero_id, 5, tokens) for tokens in batch[:2])
    key = flax_transformer.DropoutKey(5, 11, jnp.asarray(ROWS + SECOND_PASS), 0.4)
    cut = [
        np.asarray(site(jnp.ones((*tokens.shape, 1)), jnp.asarray(tokens), key))[..., 0] == 0
        for site, tokens in ((model.src_cutoff, src), (model.tgt_cutoff, tgt))
    ]
    assert all(mask.any() for mask in cut)
    mask = jnp.asarray(src != config.pad_id)
    replaced = [jnp.asarray(np.where(zero, zero_id, tokens)) for zero, tokens in zip(cut, (src, tgt), strict=True)]
    expected = jax.jit(lambda *tokens: model(*tokens, src_mask=mask))(*replaced)
    logits = jax.jit(lambda *tokens: model(*tokens, dropout_key=key))(jnp.asarray(src), jnp.asarray(tgt))
    np.testing.assert_allclose(logits, expected, atol=1e-12)


def test_passes_have_different_masks(twins, batch):
    """Without cutoff, only the masks differ: the divergence of two passes is not zero."""
    (plain, _), *_ = in_both(twins, batch, TrainingConfig(label_smoothing=SMOOTHING))
    (total, _), *_ = in_both(twins, batch, replace(training("simcut"), cutoff=0.0))
    assert total > plain + 1e-2


def test_settings_without_effect_are_refused():
    for changes, message in (({"consistency_weight": 0.0}, "above 0"), ({"cutoff": 1.0}, "below 1")):
        with pytest.raises(ConfigError, match=message):
            replace(training("simcut"), **changes)


def test_the_logits_wait_in_their_dtype():
    """In bfloat16, the backward pass keeps no float32 array of the logits' shape."""
    first = jnp.ones((2, 3, 11), jnp.bfloat16)
    _, pull_back = jax.vjp(consistency.divergences, first, 2 * first)
    kept = [a.dtype for a in jax.tree.leaves(pull_back) if getattr(a, "size", 0) == first.size]
    assert kept == [jnp.bfloat16] * 2
    chex.assert_trees_all_equal_dtypes(pull_back(jnp.ones((2, 3), jnp.float32)), (first, first))
