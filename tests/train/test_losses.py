"""The losses against torch, optax and the formulas in plain float64; the hand-written gradient against autodiff."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinax.configs import ConfigError
from twinax.configs.training import TrainingConfig
from twinax.formulas.label_smoothing import SMOOTHINGS
from twinax.torch_reference import losses as torch_losses
from twinax.train.step import losses

KINDS = tuple(SMOOTHINGS)
PAD = 2


def inputs(seed, vocab_size=11, scale=3.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocab_size, (3, 5))
    labels[0, 3:] = PAD
    return rng.normal(0, scale, (3, 5, vocab_size)), labels


def in_both(logits, labels, config, pad_id=PAD):
    flax_loss = losses.cross_entropy(jnp.asarray(logits), jnp.asarray(labels), pad_id, config)
    torch_loss = torch_losses.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels), pad_id, config)
    return [(float(total), int(tokens)) for total, tokens in (flax_loss, torch_loss)]


def by_the_formula(logits, labels, kind, smoothing):
    """The loss, token by token, from the target distributions."""
    total, vocab_size = 0.0, logits.shape[-1]
    for z, label in zip(logits.reshape(-1, vocab_size), labels.ravel(), strict=True):
        if label == PAD:
            continue
        q = np.zeros(vocab_size)
        if kind == "all":
            q += smoothing / vocab_size
        elif kind == "others":
            q += smoothing / (vocab_size - 1)
        else:
            q += smoothing / (vocab_size - 2)
            q[PAD] = 0
        q[label] = 1 - smoothing + (smoothing / vocab_size if kind == "all" else 0)
        assert q.sum() == pytest.approx(1, abs=1e-12)
        log_p = z - z.max() - np.log(np.exp(z - z.max()).sum())
        total -= (q * log_p).sum()
        total += (q[q > 0] * np.log(q[q > 0])).sum() if kind != "all" else 0
    return total


@given(seed=st.integers(0, 999), smoothing=st.floats(0, 0.9), scale=st.sampled_from([0.1, 3, 300]))
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_formula(kind, seed, smoothing, scale):
    logits, labels = inputs(seed, scale=scale)
    config = TrainingConfig(label_smoothing=smoothing, smoothing=kind)
    expected = by_the_formula(logits, labels, kind, smoothing)
    for total, tokens in in_both(logits, labels, config):
        assert total == pytest.approx(expected, rel=1e-13, abs=1e-12)
        assert tokens == (labels != PAD).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_over_all_is_torch_s_and_optax_s(smoothing):
    logits, labels = inputs(0)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits).flatten(0, 1), torch.from_numpy(labels).flatten(), label_smoothing=smoothing,
        ignore_index=PAD, reduction="sum",
    )  # fmt: skip
    soft_labels = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float64), smoothing)
    optax_loss = jnp.where(labels != PAD, optax.softmax_cross_entropy(jnp.asarray(logits), soft_labels), 0).sum()
    assert float(optax_loss) == pytest.approx(expected.item(), rel=1e-13)
    for total, _ in in_both(logits, labels, TrainingConfig(label_smoothing=smoothing)):
        assert total == pytest.approx(expected.item(), rel=1e-13)


def test_over_others_but_padding_is_torch_s_kl_divergence():
    """As in The Annotated Transformer: `KLDivLoss` to a target distribution that is filled in place."""
    logits, labels = inputs(1)
    x, y = torch.from_numpy(logits).flatten(0, 1).log_softmax(-1), torch.from_numpy(labels).flatten()
    q = torch.full_like(x, 0.1 / (x.shape[1] - 2))
    q.scatter_(1, y[:, None], 0.9)
    q[:, PAD] = 0
    q[y == PAD] = 0
    expected = torch.nn.KLDivLoss(reduction="sum")(x, q).item()
    for total, _ in in_both(logits, labels, TrainingConfig(label_smoothing=0.1, smoothing="others_but_padding")):
        assert total == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradient_is_the_plain_one(kind, smoothing):
    """Against JAX's and PyTorch's autodiff of the same formula; with a scaled loss, under jit."""
    logits, labels = inputs(2)
    config = TrainingConfig(label_smoothing=smoothing, smoothing=kind)
    target = SMOOTHINGS[kind](smoothing, logits.shape[-1])

    def plain_loss(z):
        per_token, _ = losses._forward(z, jnp.asarray(labels), PAD, target)
        return 0.7 * jnp.where(labels != PAD, per_token, 0).sum()

    def loss(z):
        return 0.7 * losses.cross_entropy(z, jnp.asarray(labels), PAD, config)[0]

    gradient = jax.jit(jax.grad(loss))(jnp.asarray(logits))
    z = torch.from_numpy(logits).requires_grad_()
    (0.7 * torch_losses.cross_entropy(z, torch.from_numpy(labels), PAD, config)[0]).backward()
    for expected in (jax.grad(plain_loss)(jnp.asarray(logits)), z.grad.numpy()):
        assert np.abs(np.asarray(gradient) - np.asarray(expected)).max() < 1e-15


def test_only_the_logits_wait_for_the_gradient():
    """In bfloat16: no float32 array of (B, T, V) is saved for the backward pass, unlike with autodiff."""
    logits, labels = (jnp.asarray(a) for a in inputs(3))
    logits = logits.astype(jnp.bfloat16)
    config = TrainingConfig(label_smoothing=0.1)
    target = SMOOTHINGS["all"](0.1, logits.shape[-1])

    def residuals(function):
        _, pull_back = jax.vjp(function, logits)
        return [a for a in jax.tree.leaves(pull_back) if getattr(a, "size", 0) == logits.size]

    leaves = residuals(lambda z: losses.cross_entropy(z, labels, PAD, config)[0])
    assert [a.dtype for a in leaves] == [jnp.bfloat16]
    plain_leaves = residuals(lambda z: losses._forward(z, labels, PAD, target)[0].sum())
    assert any(a.dtype == jnp.float32 for a in plain_leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_alone_is_zero_over_zero_tokens(kind):
    logits, labels = inputs(4)
    config = TrainingConfig(label_smoothing=0.1, smoothing=kind)
    assert in_both(logits, np.full_like(labels, PAD), config) == [(0.0, 0), (0.0, 0)]
    gradient = jax.grad(lambda z: losses.cross_entropy(z, jnp.full(labels.shape, PAD), PAD, config)[0])
    assert not gradient(jnp.asarray(logits)).any()


def test_padding_with_infinite_logits_does_not_spread():
    logits, labels = inputs(5)
    logits[0, 4] = np.nan
    config = TrainingConfig(label_smoothing=0.1)
    assert all(np.isfinite(total) for total, _ in in_both(logits, labels, config))


def test_a_suppressed_token_is_torch_s():
    """A logit of -inf adds no loss where its target probability is 0."""
    logits, labels = inputs(6)
    logits[..., 7] = -np.inf
    labels[labels == 7] = 6
    flat = torch.from_numpy(logits).flatten(0, 1), torch.from_numpy(labels).flatten()
    expected = torch.nn.functional.cross_entropy(*flat, ignore_index=PAD, reduction="sum").item()
    for total, _ in in_both(logits, labels, TrainingConfig()):
        assert total == pytest.approx(expected, rel=1e-13)
    gradient = jax.grad(lambda z: losses.cross_entropy(z, jnp.asarray(labels), PAD, TrainingConfig())[0])
    assert np.isfinite(gradient(jnp.asarray(logits))).all()
    for total, _ in in_both(logits, labels, TrainingConfig(label_smoothing=0.1)):
        assert total == np.inf


def test_what_all_logits_have_in_common_costs_no_digits():
    logits, labels = inputs(7, vocab_size=1000)
    config = TrainingConfig(label_smoothing=0.1)
    logits32 = logits.astype(np.float32) + np.float32(4096)
    logits64 = logits32.astype(np.float64)

    def gradient(z):
        return np.asarray(jax.grad(lambda z: losses.cross_entropy(z, jnp.asarray(labels), PAD, config)[0])(z))

    for (loss32, _), (loss64, _) in zip(
        in_both(logits32, labels, config), in_both(logits64, labels, config), strict=True
    ):
        assert loss32 == pytest.approx(loss64, rel=1e-6)
    assert np.abs(gradient(jnp.asarray(logits32)) - gradient(jnp.asarray(logits64))).max() < 1e-6


@pytest.mark.parametrize("shape", [(3, 1), (1, 5), (3, 6)])
def test_labels_of_another_shape_are_refused(shape, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    logits, _ = inputs(8)
    with pytest.raises(ValueError, match=r"^labels: must be integers of shape \[3, 5\], not int64"):
        losses.cross_entropy(jnp.asarray(logits), jnp.ones(shape, int), PAD, TrainingConfig())
    with pytest.raises(ValueError, match=r"^labels: must be integers of shape \[3, 5\], not torch.int64"):
        torch_losses.cross_entropy(torch.from_numpy(logits), torch.ones(shape, dtype=int), PAD, TrainingConfig())


@pytest.mark.parametrize("label", [-100, -1, 11])
def test_a_label_outside_the_vocabulary_is_no_loss(label):
    """JAX cannot raise under jit: the loss is NaN, which the step refuses."""
    logits, labels = inputs(8)
    labels[1, 2] = label
    assert jnp.isnan(losses.cross_entropy(jnp.asarray(logits), jnp.asarray(labels), PAD, TrainingConfig())[0])
    with pytest.raises(ValueError, match=f"^labels: 1 are outside the vocabulary, 0 to 10, the first is {label}$"):
        torch_losses.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels), PAD, TrainingConfig())


@pytest.mark.parametrize(("kind", "vocab_size"), [("others", 1), ("others_but_padding", 2)])
def test_a_vocabulary_without_other_tokens_is_refused(kind, vocab_size):
    with pytest.raises(ConfigError, match="no other token that could share it"):
        SMOOTHINGS[kind](0.1, vocab_size)


@jax.jit
@jax.grad
def gradient_of_flax(z, labels):
    return losses.cross_entropy(z, labels, PAD, TrainingConfig())[0]


@given(seed=st.integers(0, 999))
def test_gradients_of_many_tokens_are_equally_exact(seed):
    """In float32, with a vocabulary of 6,000 in which one token is nearly certain."""
    logits, labels = inputs(seed, 6000)
    indices = logits.argmax(-1)[..., None]
    np.put_along_axis(logits, indices, np.take_along_axis(logits, indices, -1) + 10, -1)
    config = TrainingConfig()

    def of_torch(z):
        z = torch.from_numpy(z).requires_grad_()
        total, _ = torch_losses.cross_entropy(z, torch.from_numpy(labels), PAD, config)
        total.backward()
        return z.grad.numpy()

    logits32 = logits.astype(np.float32)
    expected = of_torch(logits32.astype(np.float64))
    flax = gradient_of_flax(logits32, labels)
    errors = [np.sqrt(np.square(side - expected).sum()) for side in (np.asarray(flax, np.float64), of_torch(logits32))]
    # A term-by-term sum over the vocabulary is ten times less exact.
    assert max(errors) < 1.5e-6, errors
