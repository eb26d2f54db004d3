"""Gradients of pairs: equal for correct ports, and a gradient that stops or is wrong is found at its line."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from twinax.compare.capture.jax_trace import capture_jax
from twinax.compare.capture.models import capture
from twinax.compare.capture.torch_trace import capture_torch
from twinax.compare.repair.diagnosis import diagnose_traces
from twinax.compare.training.gradients import diagnose_gradients

pytestmark = pytest.mark.newest

X = np.random.default_rng(0).standard_normal((3, 5, 6))


class Tower(nn.Module):
    """Tied projections, attention whose key bias has no gradient, and a norm."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        y = y + self.attention(y, y, y)[0]
        return {"tied": self.tied(self.norm(y)), "norm": self.norm(y).mean(1)}


@jax.custom_vjp
def squashed(x):
    return jnp.tanh(x)


def forward(x):
    return jnp.tanh(x), jnp.tanh(x)  # wrong derivative


def backward(y, cotangent):
    return (cotangent * (1 - y),)


squashed.defvjp(forward, backward)


def port(p, x, wrong=""):
    y = x @ p["w"] + p["b"]
    y = squashed(y) if wrong == "derivative" else jnp.tanh(y)
    heads = [jnp.stack(jnp.split(y @ p[f"{n}_w"] + p[f"{n}_b"], 2, -1), 1) for n in "qkv"]
    weights = jax.nn.softmax(heads[0] @ heads[1].transpose(0, 1, 3, 2) / 3**0.5)
    if wrong == "weights":
        weights = jax.lax.stop_gradient(weights)  # stop
    mixed = jnp.concatenate([*(weights @ heads[2]).transpose(1, 0, 2, 3)], -1)
    y = y + mixed @ p["o_w"].T + p["o_b"]
    mean = y.mean(-1, keepdims=True)
    if wrong == "mean":
        mean = jax.lax.stop_gradient(mean)  # stop the mean
    y = (y - mean) / jnp.sqrt(jnp.square(y - mean).mean(-1, keepdims=True) + 1e-5)
    y = y * p["g"] + p["c"]
    return {"tied": y @ p["w"], "norm": y.mean(1)}


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    module = Tower().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


@pytest.fixture(scope="module")
def weights(tower):
    arrays = {name: tensor.detach().numpy() for name, tensor in tower.named_parameters()}
    packed = {f"{n}_w": w.T for n, w in zip("qkv", np.split(arrays["attention.in_proj_weight"], 3), strict=True)}
    packed |= {f"{n}_b": b for n, b in zip("qkv", np.split(arrays["attention.in_proj_bias"], 3), strict=True)}
    packed |= {"w": arrays["inner.weight"].T, "b": arrays["inner.bias"], "g": arrays["norm.weight"]}
    packed |= {"c": arrays["norm.bias"], "o_w": arrays["attention.out_proj.weight"]}
    return {name: jnp.asarray(array) for name, array in (packed | {"o_b": arrays["attention.out_proj.bias"]}).items()}


def run(reference, candidate):
    traces = capture(reference, (X,)), capture(candidate, (X,))
    diagnosis = diagnose_traces(*traces)
    assert diagnosis.verdict == "equal"
    return diagnose_gradients((reference, candidate), ((X,), (X,)), traces, diagnosis)


def line_of(comment):
    source, first = inspect.getsourcelines(inspect.getmodule(run))
    (number,) = (i for i, line in enumerate(source, max(first, 1)) if line.rstrip().endswith(f"# {comment}"))
    return f"training/test_gradients.py:{number}"


def test_captured_gradients_are_those_of_autograd_and_of_jax(tower, weights):
    cotangents = {"tied": np.cos(X), "norm": np.sin(X[:, 0])}
    trace = capture_torch(tower, (X,), cotangents)
    wide = Tower().double()
    wide.load_state_dict(tower.state_dict())
    outputs = wide(torch.from_numpy(X))
    sum((outputs[name] * torch.from_numpy(array)).sum() for name, array in cotangents.items()).backward()
    for name, parameter in wide.named_parameters():
        np.testing.assert_allclose(trace.values[trace.gradients[name]], parameter.grad.numpy(), atol=1e-13)
    assert all(operation.line for operation in trace.operations)

    def total(p):
        outputs = port(p, X)
        return sum((outputs[name] * array).sum() for name, array in cotangents.items())

    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(total))({name: np.asarray(array, np.float64) for name, array in weights.items()})
    trace = capture_jax(port, weights, (X,), cotangents)
    for name, array in expected.items():
        np.testing.assert_allclose(trace.values[trace.gradients[name]], array, atol=1e-13)


def test_a_correct_port_has_equal_gradients(tower, weights):
    """Packed, transposed and tied ones too; that of the key's bias is zero but for rounding on both sides."""
    diagnosis = run(tower, (port, weights))
    assert (diagnosis.verdict, diagnosis.defects) == ("equal", ())
    assert run((port, weights), tower).verdict == "equal"


@pytest.mark.parametrize(
    ("wrong", "comment"), [("weights", "stop"), ("mean", "stop the mean"), ("derivative", "wrong derivative")]
)
def test_a_wrong_gradient_is_found_at_its_line(wrong, comment, tower, weights):
    diagnosis = run(tower, (lambda p, x: port(p, x, wrong), weights))
    (defect,) = diagnosis.defects
    assert diagnosis.verdict == "different"
    assert line_of(comment) in defect.lines
    stop = jax.lax.stop_gradient
    assert stop.__module__.startswith("jax")  # it is put back


def test_detach_and_frozen_parameters_in_torch(tower):
    class Detached(Tower):
        def forward(self, x):
            y = torch.tanh(self.inner(x))
            y = y + self.attention(y.detach(), y, y)[0]  # detached
            return {"tied": self.tied(self.norm(y)), "norm": self.norm(y).mean(1)}

    other = Detached().eval()
    other.load_state_dict(tower.state_dict())
    (defect,) = run(tower, other).defects
    assert (defect.lines, str(defect.repair)) == ((line_of("detached"),), "without aten.detach")
    assert torch.Tensor.detach is torch._C.TensorBase.detach
    frozen = Tower().eval()
    frozen.load_state_dict(tower.state_dict())
    frozen.norm.bias.requires_grad_(False)
    (defect,) = run(tower, frozen).defects
    assert str(defect) == "norm.bias: no gradient in the candidate, so it is not trained there"


def test_a_gradient_of_rounding_beside_one_of_zero_is_no_difference():
    """A softmax does not see the bias of a key, so a port may leave it out."""
    random = np.random.default_rng(0)
    arrays = {"w": random.standard_normal((6, 6)), "b": random.standard_normal(6)}
    pair = (
        lambda p, x: torch.softmax(x @ (x @ p["w"] + p["b"]).transpose(-1, -2), -1),
        {name: torch.from_numpy(array) for name, array in arrays.items()},
    )
    candidate = (lambda p, x: jax.nn.softmax(x @ (x @ p["w"]).transpose(0, 2, 1)), arrays)
    diagnosis = run(pair, candidate)
    assert (diagnosis.verdict, diagnosis.defects) == ("equal", ())


def test_gradients_of_equal_parameters_are_added_where_the_other_model_has_one():
    table = np.random.default_rng(1).standard_normal((6, 6))

    def two(p, x):
        return jnp.tanh(x @ p["one"]) @ p["other"].T

    def tied(p, x):
        return jnp.tanh(x @ p["table"]) @ p["table"].T

    x = np.random.default_rng(2).standard_normal((4, 6))
    models = (two, {"one": table, "other": table.copy()}), (tied, {"table": table})
    traces = capture(models[0], (x,)), capture(models[1], (x,))
    outputs = diagnose_traces(*traces)
    assert outputs.weights.ties == {"one": ("other",)}
    assert diagnose_gradients(models, ((x,), (x,)), traces, outputs).verdict == "equal"
