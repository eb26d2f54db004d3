"""Arrays that are too large for copies in float64: what is kept of them, and that nothing else changes."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity_tests.compare.capture.test_recording import assert_stored
from twinax.compare import rounding
from twinax.compare.capture.arrays import LARGE, Arrays, narrowed, widened
from twinax.compare.capture.models import capture
from twinax.compare.comparison import compare

TOKENS, WIDTH = 1100, 1024  # more than LARGE together
IDS = np.random.default_rng(0).integers(0, TOKENS, (2, 3))


class Reference(nn.Module):
    """A large embedding, whose transpose is the projection to the logits, and two large layers."""

    def __init__(self, dtype=torch.float32, max_norm=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH, max_norm=max_norm)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.to(dtype)

    def forward(self, ids):
        """(batch, tokens) -> logits (batch, tokens, TOKENS)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.embedding.weight.T


def port(p, ids, scale=1.0):
    """The same, with the layers stacked for a scan."""
    x = p["embedding"][ids]

    def layer(x, layer):
        return jnp.tanh(x @ layer["kernel"] * scale + layer["bias"]), None

    x, _ = jax.lax.scan(layer, x, p["layers"])
    return x @ p["embedding"].astype(x.dtype).T


def converted(model):
    """The port's parameters."""
    arrays = {name: jnp.asarray(p.detach().float().numpy()) for name, p in model.named_parameters()}
    arrays = {
        name: a.astype(jnp.bfloat16) if model.embedding.weight.dtype == torch.bfloat16 else a
        for name, a in arrays.items()
    }
    stacked = {n: jnp.stack([arrays[f"layers.{i}.{n}"] for i in range(2)]) for n in ("weight", "bias")}
    return {
        "embedding": arrays["embedding.weight"],
        "layers": {"kernel": stacked["weight"].transpose(0, 2, 1), "bias": stacked["bias"]},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_parameters_are_not_copied(dtype, monkeypatch):
    """Neither are their views; they read as float64, and the verdicts are those of small ones."""
    monkeypatch.setattr(rounding, "_INPUTS", 2)
    model = Reference(dtype)
    before = copy.deepcopy(model.state_dict())
    parameters = converted(model)
    comparison = compare(model, (port, parameters), (IDS,))
    assert comparison.verdict == "equal"
    assert not any(entry.failure for entry in comparison.rounding)
    matches = comparison.forward.weights.matches
    assert matches["layers.kernel"].sources == ("layers.0.weight", "layers.1.weight")
    own = [model.embedding.weight.detach().view(torch.uint8).numpy(), np.asarray(parameters["embedding"])]
    for trace, name, memory in zip(comparison.traces, ("embedding.weight", "embedding"), own, strict=True):
        number = trace.parameters[name]
        large = [trace.values.kept(n) for n in range(len(trace.values)) if trace.values.kept(n).size >= LARGE]
        assert len(large) > 3
        assert {array.dtype.itemsize for array in large} == {model.embedding.weight.element_size()}
        assert np.shares_memory(trace.values.kept(number), memory)
        assert trace.values[number].dtype == np.float64
        np.testing.assert_array_equal(trace.values[number], np.asarray(parameters["embedding"], np.float64))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    wrong = compare(model, (lambda p, ids: port(p, ids, 1.01), parameters), (IDS,), rounding=False)
    assert wrong.verdict == "different"
    assert wrong.forward.verified


def test_a_model_that_writes_to_its_large_parameter_keeps_it():
    """`max_norm` scales rows of the embedding in each forward pass."""
    model = Reference(max_norm=0.5)
    before = model.embedding.weight.detach().clone()
    trace = capture(model, (IDS,))
    assert torch.equal(model.embedding.weight, before)
    expected = copy.deepcopy(model).double()(torch.tensor(IDS)).detach()
    np.testing.assert_allclose(trace.values[trace.outputs["output"]], expected, rtol=1e-12, atol=1e-13)


def test_a_trace_with_large_arrays_is_stored_and_computed_again():
    trace = capture((port, converted(Reference())), (IDS,))
    assert_stored(trace)
    number = trace.parameters["embedding"]
    values = trace.replay({number: trace.values[number] * 2})
    changed = converted(Reference())
    changed["embedding"] = changed["embedding"] * 2
    expected = capture((port, changed), (IDS,))
    output = trace.outputs["output"]
    np.testing.assert_allclose(values[output], expected.values[output], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_a_large_array_is_kept_in_float32_where_that_holds_it(exact):
    array = np.random.default_rng(0).standard_normal(LARGE)
    array[: None if exact else 100] = array[: None if exact else 100].astype(np.float32)
    arrays = Arrays()
    arrays.append(array)
    arrays.append(array[:-1])
    assert [arrays.kept(i).dtype for i in range(2)] == [np.float32 if exact else np.float64, np.float64]
    assert arrays.kind(0) == "f"
    for read in (arrays[0], next(iter(arrays)), widened(narrowed(array))):
        np.testing.assert_array_equal(read, array)
    assert arrays.with_changes({1: array[:3]})[1].shape == (3,)


@pytest.mark.slow
def test_every_other_test_holds_if_all_arrays_are_large(tmp_path):
    """Which arrays count as large changes no result: all tests of the comparison, with a bound of 64 numbers."""
    (tmp_path / "small_bound.py").write_text(PLUGIN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "small_bound", str(Path(__file__).parents[1])]
    others = ["--deselect", str(Path(__file__).relative_to(Path.cwd()))]
    result = subprocess.run([*command, *others], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


PLUGIN = """
def pytest_sessionstart():
    from twinax.compare.capture import arrays
    arrays.LARGE = 64
"""
