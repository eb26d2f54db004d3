"""Batch norm in training mode: the statistics of the batch in the outputs, the running statistics as outputs."""

import inspect

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from twinax.compare.capture.torch_trace import capture_torch
from twinax.compare.capture.trace import CaptureError
from twinax.compare.comparison import compare

WIDTH, RATE, ROWS = 8, 0.3, 5
X = np.random.default_rng(0).standard_normal((ROWS, 6))


class Reference(nn.Module):
    """Two norms around a dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.first = nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH)
        self.dropout, self.outer, self.second = nn.Dropout(RATE), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.second(self.outer(self.dropout(torch.tanh(self.first(self.inner(x))))))


@pytest.fixture(scope="module")
def reference():
    return Reference().train()


@pytest.fixture(scope="module")
def arrays(reference):
    return {name: tensor.detach().numpy().copy() for name, tensor in reference.state_dict().items()}


def norm(p, name, x, decay=0.9, unbiased=True, epsilon=1e-5):
    mean, variance = x.mean(0), x.var(0)
    y = (x - mean) / jnp.sqrt(variance + epsilon)  # epsilon
    y = y * p[f"{name}.weight"] + p[f"{name}.bias"]
    variance = variance * ROWS / (ROWS - 1) if unbiased else variance
    mean = decay * p[f"{name}.running_mean"] + (1 - decay) * mean  # decay
    variance = decay * p[f"{name}.running_var"] + (1 - decay) * variance  # variance
    return y, {"mean": mean, "variance": variance}


def port(*mistakes):
    """The statistics come in the opposite order of the layers, and with other names."""

    def run(p, x):
        settings = {"decay": 0.8 if "decay" in mistakes else 0.9, "unbiased": "variance" not in mistakes}
        y, first = norm(p, "first", x @ p["inner.weight"].T + p["inner.bias"], **settings)  # first
        y, keep = jnp.tanh(y), jax.random.bernoulli(jax.random.key(0), 1 - RATE, y.shape)
        y = jnp.where(keep, y if "scale" in mistakes else y / (1 - RATE), 0)  # scale
        epsilon = 1e-3 if "epsilon" in mistakes else 1e-5
        y, second = norm(p, "second", y @ p["outer.weight"].T + p["outer.bias"], epsilon=epsilon)
        return y if "unreturned" in mistakes else (y, {"a": second, "b": first})

    return run


def line_of(comment):
    source, first = inspect.getsourcelines(inspect.getmodule(line_of))
    (number,) = (i for i, line in enumerate(source, max(first, 1)) if line.endswith(f"# {comment}\n"))
    return f"training/test_statistics.py:{number}"


def test_buffers_after_the_update_are_those_of_pytorch(reference):
    trace = capture_torch(reference, (X,), random=True)
    module = Reference().double().train()
    module(torch.from_numpy(X))
    buffers = {name: b.numpy() for name, b in module.named_buffers() if name.startswith("first.running")}
    for name, array in buffers.items():
        np.testing.assert_allclose(trace.values[trace.outputs[name]], array, atol=1e-15)
        np.testing.assert_array_equal(trace.values[trace.parameters[name]], float(name.endswith("var")))
    changes = trace.replay({trace.inputs["0"]: 2 * X})
    assert {trace.outputs["first.running_mean"], trace.outputs["second.running_var"]} <= changes.keys()
    with pytest.raises(CaptureError, match="first: is in training mode"):
        capture_torch(reference, (X,))


def test_a_correct_port_is_equal_in_outputs_statistics_and_gradients(reference, arrays):
    comparison = compare(reference, (port(), arrays), (X,), gradients=True, dropout=True)
    assert comparison.verdict == "equal", str(comparison)
    assert comparison.backward is not None
    assert len(comparison.traces[1].outputs) == 5
    assert not any(gap.startswith("output") for gap in comparison.coverage_gaps)


def test_statistics_that_the_port_does_not_return_are_listed(reference, arrays):
    comparison = compare(reference, (port("unreturned"), arrays), (X,), dropout=True)
    assert comparison.verdict == "equal"
    assert "output first.running_var of the reference: the candidate has none for it" in comparison.coverage_gaps


def test_three_mistakes_at_once_are_all_named(reference, arrays):
    comparison = compare(reference, (port("variance", "scale", "epsilon"), arrays), (X,), dropout=True)
    lines = {line for defect in comparison.forward.defects for line in defect.lines}
    assert lines == {line_of("variance"), line_of("scale"), line_of("epsilon")}, str(comparison)
    assert comparison.forward.verified


def test_another_decay_is_found_in_both_statistics(reference, arrays):
    comparison = compare(reference, (port("decay"), arrays), (X,), dropout=True)
    # the other call is right; its variances, which were all 1, do not tell
    assert {defect.lines[0] for defect in comparison.forward.defects} == {line_of("first"), line_of("variance")}


class Nnx(nnx.Module):
    def __init__(self, momentum=0.9):
        rngs, settings = nnx.Rngs(0), {"momentum": momentum, "epsilon": 1e-5}
        self.inner, self.outer = nnx.Linear(6, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.first, self.second = (nnx.BatchNorm(WIDTH, rngs=rngs, **settings) for _ in range(2))
        self.dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(dropout=1))

    def __call__(self, x):
        y = self.first(self.inner(x))  # first of NNX
        return self.second(self.outer(self.dropout(jnp.tanh(y))))  # second of NNX


def test_a_module_of_nnx_has_the_biased_variance(reference, arrays):
    module = Nnx()
    for name in ("inner", "outer"):
        getattr(module, name).kernel[...] = jnp.asarray(arrays[f"{name}.weight"].T)
        getattr(module, name).bias[...] = jnp.asarray(arrays[f"{name}.bias"])
    comparison = compare(reference, module, (X,), dropout=True)
    assert comparison.traces[1].buffers == {"first.mean", "first.var", "second.mean", "second.var"}
    assert [(*d.lines, str(d.repair)) for d in comparison.forward.defects] == [
        (line_of(f"{name} of NNX"), f"mul: 0.1 → {0.1 * ROWS / (ROWS - 1):.9g}") for name in ("first", "second")
    ]
    assert comparison.forward.verified


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.tanh(self.norm(x))


def test_linen_and_equinox_write_statistics():
    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.tanh(linen.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)(x))

    norm = equinox.nn.make_with_state(equinox.nn.BatchNorm)(6, "batch", eps=1e-5, momentum=0.9, mode="batch")
    trained, fixed = equinox.partition(norm, equinox.is_array)

    def in_equinox(p, x):
        model, state = equinox.combine(p, fixed)
        y, state = jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)
        return jnp.tanh(y), state

    biased = compare(Norm().train(), (Linen(), Linen().init(jax.random.key(0), X)), (X,), dropout=True)
    assert [defect.error < 0.1 for defect in biased.forward.defects] == [True]
    without_start = compare(Norm().train(), (in_equinox, trained), (X,), dropout=True)
    assert str(without_start.forward.defects[0].repair) == "without div"  # the mean is divided by 1 - momentum ** count
    for comparison in (biased, without_start):
        assert len(comparison.traces[1].outputs) == 3
        ends = {defect.reference[-1].outputs[0] for defect in comparison.forward.defects}
        assert comparison.traces[0].outputs["output"] not in ends
