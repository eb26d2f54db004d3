"""Diagnosis where differences are small, where values match though they are swapped, and of unusual outputs."""

import inspect
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity_tests.compare.repair.test_diagnosis import HEADS, D, heads, norm
from twinax.compare.capture.jax_trace import capture_jax
from twinax.compare.capture.trace import Trace
from twinax.compare.matching.matching import Deadline, Side, signature
from twinax.compare.repair import diagnosis
from twinax.compare.repair.diagnosis import diagnose


def test_a_small_difference_is_no_rounding_without_a_constant_in_float32():
    """Near 0 both approximations of gelu agree to 1e-7, and no number of the code is rounded."""
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU()).eval()
    weights = {name: np.asarray(p.detach(), np.float64) for name, p in model.named_parameters()}
    weights["0.bias"] = np.zeros(6)
    nn.init.zeros_(model[0].bias)

    def tanh(p, x):
        return jax.nn.gelu(x @ p["0.weight"].T + p["0.bias"], approximate=True)

    inputs = (0.02 * np.random.default_rng(0).standard_normal((5, 4)),)
    diagnosis = diagnose(model, (tanh, weights), inputs)
    assert diagnosis.verdict == "different"
    (defect,) = diagnosis.defects
    assert defect.error < 2e-7
    assert str(defect.repair) == "should be erf gelu"


def test_the_constant_in_float32_is_named_with_its_line():
    weights = {"w": np.random.default_rng(0).standard_normal((4, 4))}

    def exact(p, x):
        return jax.nn.relu(x @ p["w"] / 7**0.5) @ p["w"]

    def rounded(p, x):
        return jax.nn.relu(x @ p["w"] / np.float32(7**0.5)) @ p["w"]

    line = inspect.getsourcelines(rounded)[1] + 1
    diagnosis = diagnose((exact, weights), (rounded, weights), (np.random.default_rng(1).standard_normal((2, 4)),))
    assert (diagnosis.verdict, diagnosis.defects) == ("equal but for float32 constants", ())
    (rounding,) = diagnosis.roundings
    assert rounding.lines == (f"repair/test_diagnosis_bounds.py:{line}",)
    assert "2.6457" in str(rounding.repair)


def test_a_repair_does_not_keep_what_smaller_differences_left():
    """The epsilon changes the outputs by less than 3e-6; the activation after it is one difference, not two."""
    model = nn.Sequential(nn.LayerNorm(8, eps=1e-5), nn.GELU(), nn.Linear(8, 8)).eval()
    weights = {name: np.asarray(p.detach(), np.float64) for name, p in model.named_parameters()}

    def port(p, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return jax.nn.gelu(x, approximate=True) @ p["2.weight"].T + p["2.bias"]

    inputs = (3 * np.random.default_rng(0).standard_normal((5, 8)),)
    diagnosis = diagnose(model, (port, weights), inputs)
    assert [str(defect.repair) for defect in diagnosis.defects] == ["add: 1e-06 → 1e-05", "should be erf gelu"]


def test_a_shuffle_of_a_value_is_no_match():
    """Its numbers are the same, but no order of its axes; a transposed value is one."""
    random = np.random.default_rng(0)
    value = random.standard_normal((6, 4, 5))
    side = Side(Trace("JAX", [value]))
    shuffled = random.permutation(value.ravel()).reshape(value.shape)
    heads = value.reshape(6, 2, 2, 5).transpose(0, 2, 1, 3).reshape(value.shape)
    for other, partners in ((shuffled, []), (value.transpose(1, 2, 0), [0]), (heads, [0])):
        assert list(side.partners(signature(other), other)) == partners


def test_nothing_follows_from_a_change_that_does_not_fit():
    trace = capture_jax(lambda p, x: jnp.tanh(x) @ p, np.eye(3), (np.ones((2, 3)),))
    (number,) = next(operation.outputs for operation in trace.operations if operation.name == "tanh")
    side = Side(trace)
    assert len(side.replay({number: np.zeros((2, 3))})) == 2
    assert [*side.replay({number: np.zeros((2, 4, 5))})] == [number]


def test_a_small_epsilon_is_found_at_every_norm_and_nowhere_else():
    """Each norm changes by less than 3e-6; the changes add up along the residual path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, 3 * D, 0.0, batch_first=True, norm_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    weights = {name: np.asarray(p.detach(), np.float64) for name, p in module.named_parameters()}

    def encoder(p, x):
        for i in range(2):
            name = f"layers.{i}"
            y = norm(x, p, f"{name}.norm1", eps=1e-6)
            packed = y @ p[f"{name}.self_attn.in_proj_weight"].T + p[f"{name}.self_attn.in_proj_bias"]
            q, k, v = (heads(part) for part in jnp.split(packed, 3, -1))
            mixed = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / (D // HEADS) ** 0.5, -1) @ v
            mixed = mixed.transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + mixed @ p[f"{name}.self_attn.out_proj.weight"].T + p[f"{name}.self_attn.out_proj.bias"]
            y = norm(x, p, f"{name}.norm2", eps=1e-6)
            inner = jax.nn.relu(y @ p[f"{name}.linear1.weight"].T + p[f"{name}.linear1.bias"])
            x = x + inner @ p[f"{name}.linear2.weight"].T + p[f"{name}.linear2.bias"]
        return x

    inputs = (1.5 * np.random.default_rng(0).standard_normal((2, 5, D)),)
    diagnosis = diagnose(module, (encoder, weights), inputs)
    assert [str(defect.repair) for defect in diagnosis.defects] == 4 * ["add: 1e-06 → 1e-05"]


def test_exchanged_projections_are_named_though_their_values_match():
    model = nn.ModuleDict({"gate": nn.Linear(6, 8), "up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})
    weights = {name: np.asarray(p.detach(), np.float64) for name, p in model.named_parameters()}

    def swiglu(p, x):
        gate, up = x @ p["gate.weight"].T + p["gate.bias"], x @ p["up.weight"].T + p["up.bias"]
        return (jax.nn.silu(gate) * up) @ p["down.weight"].T + p["down.bias"]

    names = {"gate": "up", "up": "gate", "down": "down"}
    exchanged = {f"{names[n.partition('.')[0]]}.{n.partition('.')[2]}": a for n, a in weights.items()}
    diagnosis = diagnose((swiglu, weights), (swiglu, exchanged), (np.random.default_rng(0).standard_normal((3, 6)),))
    (defect,) = diagnosis.defects
    first, _, second, _, kind = str(defect.repair).split()
    assert {first.partition(".")[0], second.partition(".")[0], kind} == {"gate", "up", "swapped"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros((0, 4)), "outputs are empty"),
        (np.full((2, 4), np.nan), "no element of the outputs"),
        (np.zeros((2, 4)), "all elements of the outputs are equal"),
    ],
)
def test_outputs_without_numbers_prove_nothing(value, reason):
    module = nn.Linear(4, 3)
    weights = {name: np.asarray(p.detach()) for name, p in module.named_parameters()}
    module.bias.data.zero_()
    diagnosis = diagnose(module, (lambda p, x: 3 * (x @ p["weight"].T), weights), (value,))
    assert diagnosis.verdict == "undecided"
    assert reason in diagnosis.reason


def test_a_single_number_is_an_output():
    weights = {"w": np.random.default_rng(0).standard_normal((4, 4))}
    x = (np.random.default_rng(1).standard_normal((3, 4)),)
    loss, other_loss = (lambda p, x: jnp.mean(x @ p["w"])), (lambda p, x: jnp.sum(x @ p["w"]))
    assert diagnose((loss, weights), (loss, weights), x).verdict == "equal"
    assert diagnose((loss, weights), (other_loss, weights), x).verdict == "different"


def test_exchanged_outputs_and_booleans():
    weights = {"w": np.random.default_rng(0).standard_normal((4, 4))}
    x = (np.random.default_rng(1).standard_normal((3, 4)),)
    pair = (lambda p, x: (x @ p["w"], jnp.tanh(x @ p["w"]))), (lambda p, x: (jnp.tanh(x @ p["w"]), x @ p["w"]))
    diagnosis = diagnose((pair[0], weights), (pair[1], weights), x)
    assert diagnosis.verdict == "different"
    assert diagnosis.reason == "output 1 of the candidate is the reference's output 0"
    assert diagnosis.rearranged == ()
    positive = (lambda p, x: x @ p["w"] > 0), (lambda p, x: x @ p["w"] >= 0)
    assert diagnose((positive[0], weights), (positive[1], weights), x).verdict == "equal"


def test_a_search_that_takes_too_long_ends_with_what_it_found(monkeypatch):
    monkeypatch.setattr(diagnosis, "_SECONDS", 0.0)
    monkeypatch.setattr(diagnosis, "_RUNS", 0.0)
    w = np.random.default_rng(0).standard_normal((5, 5))

    def reference(p, x):
        return torch.tanh(torch.sin(x @ p["w"]) @ p["w"])

    def candidate(p, x):
        return jnp.sin(jnp.cos(x @ p["w"]) @ p["w"])

    models = (reference, {"w": torch.from_numpy(w)}), (candidate, {"w": w})
    compared = diagnose(*models, (np.random.default_rng(1).standard_normal((4, 5)),))
    assert (compared.verdict, compared.reason) == ("different", "the search stopped after 0 s")
    assert len(compared.defects) == 1
    monkeypatch.undo()
    compared = diagnose(*models, (np.random.default_rng(1).standard_normal((4, 5)),))
    assert (len(compared.defects), compared.reason, compared.verified) == (2, "", True)


def test_only_the_time_of_this_process_counts():
    """A search on a busy machine finds as much as on an idle one."""
    deadline = Deadline()
    assert not deadline.is_over
    deadline.start(0.05)
    time.sleep(0.2)
    assert not deadline.is_over
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert deadline.is_over
