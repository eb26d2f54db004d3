"""Short training trajectories; conversion of the optimizer state and its errors."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from parity_tests.support import trajectories
from parity_tests.support.trajectories import InFlax, InPyTorch
from twinax import convert, torch_reference
from twinax.flax_transformer.unused_parameters import without_gradient
from twinax.torch_reference.optimizers import make_optimizer

CASES = {case.name: case for case in trajectories.trajectory_cases()}
SHORT = (  # the everyday case covers decay, accumulation, post-norm and cosine
    pytest.param("adam, noam, pre-norm", 30, id="adam, noam, pre-norm", marks=pytest.mark.slow),
    pytest.param("adamw, cosine, post-norm, 3 micro-batches", 24, id="adamw, cosine, post-norm, 3 micro-batches"),
)


def test_any_three_choices_meet():
    choices = [
        (c.training.optimizer, c.training.schedule, c.model.norm_placement, c.training.accumulation)
        for c in CASES.values()
        if c.training.consistency == "none"
    ]
    assert len(choices) == 8
    for position in range(4):
        assert len({tuple(v for i, v in enumerate(choice) if i != position) for choice in choices}) == 8


def small(case):
    model = case.model.replace(num_encoder_layers=1, num_decoder_layers=1)
    if model.norm_placement == "pre":  # as T5
        model = model.replace(relative_positions="shared", ffn_gate=True, final_dropout=0.1)
    return replace(case, model=model)


@pytest.mark.parametrize(("name", "updates"), SHORT)
def test_case(name, updates, monkeypatch):
    monkeypatch.setattr(trajectories, "INPUTS", 6)
    outcome = trajectories.measure(small(CASES[name]), updates=updates)
    assert outcome.loss <= trajectories.LOSS_BOUND
    assert outcome.handover <= trajectories.LOSS_BOUND
    assert outcome.parameters <= trajectories.PARAMETER_BOUND
    assert outcome.resumed
    assert outcome.ok
    # the loss must fall, or the comparison is empty
    assert outcome.losses[-5:].mean() < outcome.losses[:5].mean() - 0.4
    assert np.abs(np.subtract(*outcome.losses.T)).max() < np.abs(np.subtract(*outcome.narrow_losses.T)).max()


@pytest.fixture(scope="module")
def case():
    return small(CASES["adamw, noam, post-norm"])


@pytest.fixture(scope="module")
def trained(case):
    """(Flax, PyTorch) after three updates."""
    flax = InFlax(case)
    pytorch = InPyTorch(case, flax.state)
    for number in range(3):
        flax.update(number)
        pytorch.update(number)
    return flax, pytorch


@pytest.mark.parametrize("framework", ["Flax", "PyTorch"])
def test_a_resume_that_drops_a_moment_is_seen(framework, case, monkeypatch):
    side = InFlax(case) if framework == "Flax" else InPyTorch(case, InFlax(case).state)
    side.update(0)
    data, original_load = side.serialize(), type(side).load
    side.update(1)
    assert trajectories.resumes(side, data, [1])

    def load(self, data):
        original_load(self, data)
        if framework == "Flax":
            adam = convert.optimizers.adam.find_adam(self.state.optimizer)
            moments = dict(adam.mu), {**adam.nu, "output.bias": jnp.zeros_like(adam.nu["output.bias"])}
            self.state = self.state._replace(
                optimizer=convert.optimizers.adam.put_adam(self.state.optimizer, int(adam.count), *moments)
            )
        else:
            next(iter(self.optimizer.state.values()))["exp_avg"].zero_()

    monkeypatch.setattr(type(side), "load", load)
    assert not trajectories.resumes(side, data, [1])


def test_moments_are_the_other_framework_s(case, trained):
    flax, pytorch = trained
    ported_state = InPyTorch(case, flax.state).optimizer.state_dict()
    torch_state = pytorch.optimizer.state_dict()
    assert ported_state["param_groups"][0]["params"] == torch_state["param_groups"][0]["params"]
    assert ported_state["state"].keys() == torch_state["state"].keys()
    for index, entry in torch_state["state"].items():
        assert ported_state["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert ported_state["state"][index][key].dtype == value.dtype
            assert (ported_state["state"][index][key] - value).abs().max() < 1e-14, key


def test_there_and_back_is_identical(case, trained):
    flax, _ = trained
    round_trip_state = InPyTorch(case, flax.state).to_flax(3)
    for leaf, round_trip_leaf in zip(jax.tree.leaves(flax.state), jax.tree.leaves(round_trip_state), strict=True):
        assert leaf.dtype == round_trip_leaf.dtype
        assert np.array_equal(leaf, round_trip_leaf)


def test_before_the_first_update_torch_has_no_entries(case):
    flax = InFlax(case)
    pytorch = InPyTorch(case, flax.state)
    assert pytorch.optimizer.state_dict()["state"] == {}
    assert pytorch.to_flax(0).optimizer[0].count == 0


def test_parameters_that_the_loss_does_not_reach_have_no_entry(case):
    case = replace(case, model=case.model.replace(cross_attention_residual="query_only"))
    flax = InFlax(case)
    pytorch = InPyTorch(case, flax.state)
    for number in range(4):
        assert abs(flax.update(number) - pytorch.update(number)) < 1e-9
    unused_names = without_gradient(case.model)
    torch_state = pytorch.optimizer.state_dict()["state"]
    assert len(torch_state) == len(flax.state.params) - len(unused_names)
    assert InPyTorch(case, flax.state).optimizer.state_dict()["state"].keys() == torch_state.keys()
    start = InFlax(case).params()
    for name in unused_names:  # unchanged and not decayed, in both
        assert np.array_equal(flax.params()[name], start[name])
        assert np.array_equal(pytorch.params()[name], start[name])
    assert np.array_equal(
        flax.state.optimizer[0].mu[min(unused_names)], pytorch.to_flax(4).optimizer[0].mu[min(unused_names)]
    )


CHOICES = {
    "clipped and decayed as optax": {
        "clip_rule": "optax",
        "clip_norm": 0.5,
        "decayed": "all",
        "without_gradient": "decay",
    },
    "L2": {"optimizer": "adam", "decayed": "all"},
    "others share": {"smoothing": "others", "schedule": "inverse_sqrt", "learning_rate": 0.01},
    "others but padding, in steps": {
        "smoothing": "others_but_padding", "schedule": "step", "learning_rate": 0.01, "warmup_updates": 2,
        "step_updates": 2, "first_update": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_the_same_in_both(name, case):
    """Metrics of each step and all parameters, including those without a gradient."""
    training = replace(case.training, **{"weight_decay": 0.5, "warmup_updates": 4, **CHOICES[name]})
    case = replace(case, training=training, model=case.model.replace(cross_attention_residual="query_only"))
    flax = InFlax(case)
    pytorch = InPyTorch(case, flax.state)
    for number in range(5):
        assert flax.step(number) == pytest.approx(pytorch.step(number), rel=1e-9)
    start, ends = InFlax(case).params(), (flax.params(), pytorch.params())
    largest = max(np.abs(p).max() for p in ends[0].values())
    assert all(np.abs(ends[0][name] - p).max() <= 1e-9 * largest for name, p in ends[1].items())
    changed_names = {name for name, p in start.items() if not np.array_equal(p, ends[0][name])}
    unused_names = without_gradient(case.model)
    assert unused_names
    assert changed_names >= unused_names if training.without_gradient == "decay" else not changed_names & unused_names


def test_different_numbers_of_updates_are_refused(case, trained):
    pytorch = InPyTorch(case, trained[0].state)
    state = pytorch.optimizer.state_dict()
    state["state"][1]["step"] = torch.tensor(9.0)
    pytorch.optimizer.load_state_dict(state)
    with pytest.raises(convert.ConversionError, match=r"different step counts, \[3, 9\]; optax has only one"):
        pytorch.to_flax(3)


def test_a_missing_entry_is_refused(case, trained):
    pytorch = InPyTorch(case, trained[0].state)
    state = pytorch.optimizer.state_dict()
    del state["state"][0]
    pytorch.optimizer.load_state_dict(state)
    with pytest.raises(
        convert.ConversionError, match=r"1 parameters have no state while others have: src_embedding\.weight"
    ):
        pytorch.to_flax(3)


def test_what_is_not_adam_is_refused(case, trained):
    pytorch = trained[1]
    for state in (optax.sgd(0.1).init(trained[0].state.params), (trained[0].state.optimizer,) * 2):
        with pytest.raises(convert.ConversionError, match="states of Adam; one is needed"):
            convert.to_optimizer_state(state, pytorch.model, pytorch.optimizer)
    other_optimizer = make_optimizer(torch_reference.Transformer(case.model), case.training)
    with pytest.raises(convert.ConversionError, match="exactly once"):
        convert.to_optimizer_state(trained[0].state.optimizer, pytorch.model, other_optimizer)
    nested_state = optax.scale_by_adam().init([jnp.ones(3)])
    with pytest.raises(convert.ConversionError, match="the moments are a list; arrays by name are needed"):
        convert.to_optimizer_state(nested_state, pytorch.model, pytorch.optimizer)


def other_optimizers(parameters):
    """Optimizers whose state is not that of optax' Adam, each with its error message."""
    yield torch.optim.SGD(parameters, lr=0.1), "the optimizer is SGD; torch.optim.Adam or AdamW is needed"
    yield torch.optim.RAdam(parameters), "the optimizer is RAdam; torch.optim.Adam or AdamW is needed"
    for name in ("amsgrad", "maximize"):
        line = f"the optimizer has {name}=True, which optax' Adam does not have"
        yield torch.optim.AdamW(parameters, **{name: True}), line
    adam = torch.optim.Adam(parameters)
    adam.state[parameters[0]] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1)}
    yield adam, "the optimizer's state of a parameter has step, exp_avg; step, exp_avg, exp_avg_sq are needed"


def test_other_optimizers_are_refused(trained):
    flax, pytorch = trained
    for optimizer, line in other_optimizers(list(pytorch.model.parameters())):
        with pytest.raises(convert.ConversionError, match=f"^{line}$"):
            convert.to_optimizer_state(flax.state.optimizer, pytorch.model, optimizer)
        with pytest.raises(convert.ConversionError, match=f"^{line}$"):
            convert.to_optax_state(optimizer, pytorch.model, flax.state.optimizer)


def test_lost_moments_are_seen(case, trained):
    """A second moment that is off by 1e-4 exceeds the loss bound within two updates."""
    pytorch = InPyTorch(case, trained[0].state)
    for entry in pytorch.optimizer.state.values():
        entry["exp_avg_sq"] *= 1.0001
    reference = InPyTorch(case, trained[0].state)
    losses = [(pytorch.update(number), reference.update(number)) for number in (3, 4)]
    assert np.abs(np.subtract(*np.array(losses).T)).max() > trajectories.LOSS_BOUND
