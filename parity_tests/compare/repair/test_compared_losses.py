"""Losses of torch beside those that people write with optax: a scalar names its line, and a repair holds elsewhere too.

What is planted is undone by hand, on other inputs and weights, before a repair counts as right.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F

from twinax.compare.repair.diagnosis import diagnose

VOCAB, WIDTH = 11, 6
LABELS = np.array([[3, 4, 10, -100], [7, 0, -100, -100]])


class Loss(torch.nn.Module):
    """A head and a loss of (logits, labels)."""

    def __init__(self, loss):
        super().__init__()
        self.head, self.loss = torch.nn.Linear(WIDTH, VOCAB), loss

    def forward(self, hidden, labels):
        return self.loss(self.head(hidden), labels)


def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)


def plain(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def divergence(logits, labels):
    target = F.one_hot(labels.clamp(min=0), VOCAB) * 0.8 + 0.2 / VOCAB
    return F.kl_div(F.log_softmax(logits, -1), target, reduction="batchmean")


def focal(logits, labels):
    log_p = F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def contrastive(logits, labels):
    one, other = (F.normalize(x, dim=-1) for x in (logits[0], logits[1]))
    return F.cross_entropy(one @ other.T / 0.07, torch.arange(len(one)))


def smoothed_port(logits, labels):
    low = 0.1 / (VOCAB - 1)
    soft = jax.nn.one_hot(labels, VOCAB) * (0.9 - low) + low  # wrong
    loss, mask = optax.softmax_cross_entropy(logits, soft), labels != -100
    return (loss * mask).sum() / mask.sum()


def plain_port(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(labels < 0, 0, labels))
    return (loss * (labels >= 0)).mean()  # wrong


def divergence_port(logits, labels):
    target = jax.nn.one_hot(jnp.maximum(labels, 0), VOCAB) * 0.8 + 0.2 / VOCAB
    return optax.kl_divergence(jax.nn.log_softmax(logits), target).mean()  # wrong


def focal_port(logits, labels):
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return (-((1 - jnp.exp(log_p)) ** 3) * log_p).mean()  # wrong


def contrastive_port(logits, labels):
    one, other = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (logits[0], logits[1]))
    return optax.softmax_cross_entropy_with_integer_labels(one @ other.T / 0.1, jnp.arange(len(one))).mean()  # wrong


CASES = {
    smoothed: (smoothed_port, "mul: 0.89 → 0.9, add: 0.01 → 0.00909090909"),
    plain: (plain_port, "div: 8 → 5, which the reference computes"),
    divergence: (divergence_port, "div: 8 → 2"),
    focal: (focal_port, "integer_pow: y 3 → 2"),
    contrastive: (contrastive_port, "div: 0.1 → 0.07"),
}


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: loss.__name__)
def test_the_line_of_a_loss_is_named_and_its_repair_was_computed(loss):
    port, repair = CASES[loss]
    torch.manual_seed(1)
    module = Loss(loss).eval()
    weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
    hidden = np.random.default_rng(0).standard_normal((2, 4, WIDTH))
    compared = diagnose(
        module, (lambda p, h, y: port(h @ p["head.weight"].T + p["head.bias"], y), weights), (hidden, LABELS)
    )
    lines, first = inspect.getsourcelines(port)
    number = first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    (defect,) = compared.defects
    assert f"repair/test_compared_losses.py:{number}" in (
        *defect.lines,
        *defect.repair.operation.lines,
    )
    assert re.sub(r"\.0\b", "", str(defect.repair)) == repair
    assert (compared.verdict, compared.verified, compared.reason) == ("different", True, "")


def test_a_number_that_fits_one_loss_alone_is_no_repair():
    """Whatever number of this code is changed, a single loss can be met: that holds for these inputs and no others."""
    module = Loss(lambda logits, labels: (logits.softmax(-1) * logits.sin()).sum()).eval()
    weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
    hidden = np.random.default_rng(0).standard_normal((2, 4, WIDTH))

    def port(p, h, y):
        logits = h @ p["head.weight"].T + p["head.bias"]
        return (jax.nn.softmax(logits) * 1.5 * jnp.tanh(0.25 * logits)).sum() + 0.125

    compared = diagnose(module, (port, weights), (hidden, LABELS))
    assert (compared.verdict, compared.verified, compared.reason) == ("different", False, "")
    (defect,) = compared.defects
    assert defect.repair is None
    assert any("test_compared_losses" in line for line in defect.lines)
