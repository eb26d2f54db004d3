"""Optimizers of both frameworks: equal ones are equal, and the setting in which two differ is named."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from twinax.compare.training.updates import compare_updates, measured, update_of

optim = torch.optim
PARAMETERS = {"w": np.random.default_rng(0).standard_normal((3, 4)), "b": np.random.default_rng(1).standard_normal(3)}
GRADIENTS = {"w": np.random.default_rng(2).standard_normal((3, 4)), "b": np.random.default_rng(3).standard_normal(3)}


def differences(reference, candidate, gradients=GRADIENTS):
    return [str(difference) for difference in compare_updates(reference, candidate, PARAMETERS, gradients)]


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (lambda p: optim.AdamW(p, lr=2e-3, weight_decay=0.1), optax.adamw(2e-3, weight_decay=0.1)),
        (lambda p: optim.Adam(p, lr=1e-2, betas=(0.8, 0.98)), optax.adam(1e-2, 0.8, 0.98)),
        (lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True), optax.sgd(1e-2, 0.9, nesterov=True)),
        (lambda p: optim.NAdam(p, lr=1e-3, momentum_decay=1e9), lambda p: optim.NAdam(p, lr=1e-3, momentum_decay=1e9)),
    ],
)
def test_equal_optimizers(reference, candidate):
    assert differences(reference, candidate) == []
    assert differences(candidate, reference) == []


def adam(pairs):
    return optim.Adam(pairs, lr=1e-3)


def decayed(pairs):
    return optim.AdamW(pairs, lr=1e-3)


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (decayed, optax.adamw(1e-3), ["weight decay, decoupled: 0.01 in the reference, 0.0001 in the candidate"]),
        (adam, optax.adam(1e-3, eps=1e-6), ["epsilon: 1e-08 in the reference, 1e-06 in the candidate"]),
        (adam, optax.adam(5e-4), ["learning rate: 0.001 in the reference, 0.0005 in the candidate"]),
        (
            lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.1),
            optax.adamw(1e-3, weight_decay=0.1),
            [
                "weight decay, decoupled: 0 in the reference, 0.1 in the candidate",
                "weight decay as part of the gradient (L2): 0.1 in the reference, 0 in the candidate",
            ],
        ),
        (
            lambda p: optim.SGD(p, lr=0.1, weight_decay=0.5),
            optax.sgd(0.1),
            ["weight decay as part of the gradient (L2): 0.5 in the reference, 0 in the candidate"],
        ),
    ],
)
def test_the_setting_is_named(reference, candidate, expected):
    assert differences(reference, candidate)[: len(expected)] == expected


def test_betas_clipping_and_schedules_are_seen():
    assert differences(adam, optax.adam(1e-3, b2=0.98)) == ["beta 2: 0.999 in the reference, 0.98 in the candidate"]
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    assert any("clipping" in text for text in differences(adam, clipped))
    falling = optax.adam(optax.linear_schedule(1e-3, 0, 10))
    assert any(text.startswith("learning rate of the second update") for text in differences(adam, falling))
    assert any("inside the root" in text for text in differences(adam, optax.adam(1e-3, eps_root=1e-8)))


def test_a_parameter_that_is_decayed_or_trained_on_one_side_only():
    exempt = optax.adamw(1e-3, weight_decay=1e-2, mask=lambda tree: {n: v.ndim > 1 for n, v in tree.items()})
    (text,) = differences(decayed, exempt)
    assert text == "b: weight decay, decoupled: 0.01 in the reference, 0 in the candidate"
    (text,) = differences(
        lambda p: optim.AdamW([pair for pair in p if pair[0] != "b"], lr=1e-3), optax.adamw(1e-3, weight_decay=1e-2)
    )
    assert text == "b: trained: 0 in the reference, 1 in the candidate"


def test_the_largest_squares_of_amsgrad_are_kept_before_their_correction_in_torch_and_after_it_in_optax():
    first, *_ = differences(lambda p: optim.Adam(p, lr=1e-3, amsgrad=True), optax.amsgrad(1e-3))
    assert first == "rule of AMSGrad: 1 in the reference, 0 in the candidate"


def test_what_is_measured_is_what_was_set():
    settings = measured(update_of(lambda p: optim.AdamW(p, lr=3e-4, eps=1e-7, weight_decay=0.05)))
    expected = {"learning rate": 3e-4, "epsilon": 1e-7, "epsilon inside the root": 0, "weight decay, decoupled": 0.05}
    for name, value in expected.items():
        np.testing.assert_allclose(settings[name], value, rtol=1e-6, err_msg=name)
    with pytest.raises(TypeError, match=r"^int: is not an optimizer; pass an optax transformation, or "):
        update_of(1)


SEEN_LATE = {
    "Lion, b1": (optax.lion(1e-3, 0.9), optax.lion(1e-3, 0.5)),
    "RAdam, b2": (optax.radam(1e-3, 0.9, 0.999), optax.radam(1e-3, 0.9, 0.9)),
    "Rprop, etas": (lambda p: optim.Rprop(p, etas=(0.5, 1.2)), lambda p: optim.Rprop(p, etas=(0.1, 1.2))),
    "a rate that changes after update 5": (adam, optax.adam(optax.piecewise_constant_schedule(1e-3, {5: 0.1}))),
    "a rate that falls after 300,000": (adam, optax.adam(optax.piecewise_constant_schedule(1e-3, {300_000: 0.1}))),
    "NaN from update 10 on": (adam, optax.adam(lambda n: jnp.where(n < 9, 1e-3, np.nan))),
    "a warm-up from 0": (decayed, optax.adamw(optax.linear_schedule(0, 1e-3, 100), weight_decay=1e-2)),
    "accumulated gradients": (decayed, optax.MultiSteps(optax.adamw(1e-3, weight_decay=1e-2), 4)),
    "64 accumulated gradients": (decayed, optax.MultiSteps(optax.adamw(1e-3, weight_decay=1e-2), 64)),
    "a rate behind 100 accumulated gradients": tuple(optax.MultiSteps(optax.adam(rate), 100) for rate in (1e-3, 2e-3)),
    "a rate that falls behind accumulated gradients": tuple(
        optax.MultiSteps(optax.adam(optax.piecewise_constant_schedule(1e-3, {300: factor})), 4) for factor in (1.0, 0.1)
    ),
    "a schedule with a Python if": (adam, optax.adam(lambda n: 1e-3 if n < 200 else 1e-4)),
    "a clip of huge gradients": (adam, optax.chain(optax.clip(5e2), optax.adam(1e-3))),
}


@pytest.mark.parametrize("case", SEEN_LATE)
def test_what_a_few_equal_gradients_do_not_show(case):
    reference, candidate = SEEN_LATE[case]
    for found in (differences(reference, candidate), differences(candidate, reference)):
        assert found
        assert not any(text.startswith(("trained", "learning rate:")) for text in found)
    assert differences(candidate, candidate) == []
