"""Whole comparisons: rounding in float32 and bfloat16, what the inputs did not test, converters, the assertion."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from rich.console import Console
from torch import nn

from twinax.compare.capture.trace import CaptureError
from twinax.compare.page import page
from twinax.compare.repair.diagnosis import Diagnosis
from twinax.compare.report import as_document, grouped, show
from twinax.compare.testing import annotations
from twinax.parity import assert_same_function, compare

X = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).eval()


def weights(module):
    return {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in module.named_parameters()}


def port(p, x, inner=jnp.float32):
    y = jnp.tanh(x @ p["0.weight"].T + p["0.bias"]).astype(inner)
    return (y @ p["2.weight"].T.astype(inner)).astype(x.dtype) + p["2.bias"]


def test_rounding_of_a_correct_port(reference):
    comparison = compare(reference, (port, weights(reference)), (X,))
    assert comparison.verdict == "equal"
    assert [entry.dtype for entry in comparison.rounding] == ["float32", "bfloat16"]
    assert all(entry.ok and entry.inputs >= 24 for entry in comparison.rounding)
    errors = [entry.reference for entry in comparison.rounding]
    assert 1e-8 < errors[0] < 1e-6 < 1e-4 < errors[1] < 1e-1  # of the size of each dtype's epsilon


def test_logits_of_minus_infinity_round_too(reference):
    """As those of tokens that are forbidden; -inf - -inf would be NaN."""
    forbidden = np.arange(6) == 2
    module = nn.Sequential(reference, Forbidding(torch.tensor(forbidden)), nn.LogSoftmax(-1)).eval()

    def candidate(p, x, inner=jnp.float32):
        logits = port({name.removeprefix("0."): array for name, array in p.items()}, x, inner)
        return jax.nn.log_softmax(jnp.where(forbidden, -jnp.inf, logits))

    comparison = compare(module, (candidate, weights(module)), (X,))
    assert comparison.verdict == "equal"
    assert all(0 < entry.ratio <= 3 for entry in comparison.rounding)
    narrow = compare(module, (lambda p, x: candidate(p, x, jnp.bfloat16), weights(module)), (X,)).rounding[0]
    assert narrow.ratio > 100
    assert len(narrow.casts) > 0

    wrong = compare(reference, (lambda p, x: jnp.log(jnp.exp(100 * port(p, x))) / 100, weights(reference)), (X * 9,))
    assert wrong.verdict == "different in rounding"
    assert "and inf, ratio inf: more than rounding" in str(wrong)
    json.dumps(as_document(wrong), allow_nan=False)


class Forbidding(nn.Module):
    """Sets some logits to -inf."""

    def __init__(self, forbidden):
        super().__init__()
        self.register_buffer("forbidden", forbidden)

    def forward(self, logits):
        return logits.masked_fill(self.forbidden, -torch.inf)


def test_a_narrow_dtype_inside_is_seen_by_its_rounding(reference):
    """In float64 nothing differs."""
    candidate = (lambda p, x: port(p, x, jnp.bfloat16), weights(reference))
    comparison = compare(reference, candidate, (X,))
    assert (comparison.verdict, comparison.ok, comparison.forward.verdict) == ("different in rounding", False, "equal")
    assert comparison.rounding[0].ratio > 100
    assert "more than rounding" in str(comparison)
    entries = as_document(comparison)["rounding"]
    assert [len(entry["casts"]) > 0 for entry in entries] == [True, False]
    assert re.fullmatch(r"compare/test_comparison.py:\d+ \(bfloat16\)", entries[0]["casts"][0])


def test_a_wider_dtype_inside_is_no_rounding(reference):
    def wide(p, x):
        return port({name: array.astype(jnp.float32) for name, array in p.items()}, x.astype(jnp.float32))

    comparison = compare(reference, (wide, weights(reference)), (X,))
    assert [entry.failure for entry in comparison.rounding] == ["", "the candidate computes in a wider dtype"]
    exchanged = compare((wide, weights(reference)), (port, weights(reference)), (X,))
    assert exchanged.ok
    assert [entry.failure for entry in exchanged.rounding] == ["", "the reference computes in a wider dtype"]


def test_a_parameter_in_float32_explains_the_gradients_too(reference):
    """Otherwise they would differ without a reason."""
    arrays = {name: np.asarray(tensor.detach(), np.float64) for name, tensor in reference.named_parameters()}
    arrays["0.weight"] = arrays["0.weight"] * (1 + 5e-8)
    comparison = compare(reference, (port, arrays), (X,), gradients=True, rounding=False)
    assert comparison.verdict == "equal but for float32 constants", str(comparison)
    assert comparison.backward.ok


def test_rounding_of_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(torch.tanh(self.inner(x)))

    def port(p, x):
        return jnp.tanh(x @ p["weight"].T + p["inner"]) @ p["weight"].T + p["outer"]

    module = Tied().eval()
    arrays = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in module.named_parameters()}
    names = {"weight": "inner.weight", "inner": "inner.bias", "outer": "outer.bias"}
    comparison = compare(module, (port, {name: arrays[own] for name, own in names.items()}), (X,))
    assert [entry.failure for entry in comparison.rounding] == ["", ""]
    assert comparison.verdict == "equal"


def test_models_of_every_library_are_compared(reference):
    """Rounding and gradients run each of them in its own way."""

    class Nnx(nnx.Module):
        def __init__(self):
            self.inner, self.outer = nnx.Linear(6, 9, rngs=nnx.Rngs(0)), nnx.Linear(9, 6, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.outer(jnp.tanh(self.inner(x)))

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(6)(jnp.tanh(linen.Dense(9)(x)))

    class Equinox(equinox.Module):
        inner: equinox.nn.Linear
        outer: equinox.nn.Linear

        def __call__(self, x):
            return jax.vmap(lambda row: self.outer(jnp.tanh(self.inner(row))))(x)

    key = jax.random.key(0)
    models = [
        (Nnx(), ("inner.kernel", "inner.bias", "outer.kernel", "outer.bias"), True),
        ((Linen(), Linen().init(key, X)), [f"params.Dense_{i}.{n}" for i in (1, 0) for n in ("kernel", "bias")], True),
        (
            Equinox(equinox.nn.Linear(6, 9, key=key), equinox.nn.Linear(9, 6, key=key)),
            ("inner.weight", "inner.bias", "outer.weight", "outer.bias"),
            False,
        ),
    ]
    for model, own, transposed in models:

        def convert(state, own=own, transposed=transposed):
            return {n: a.T if transposed else a for n, a in zip(own, state.values(), strict=True)}

        comparison = compare(reference, model, (X,), convert=convert, gradients=True)
        assert (comparison.verdict, comparison.backward.verdict) == ("equal", "equal"), str(comparison)
        assert all(entry.ok for entry in comparison.rounding)


def test_a_converter_that_fails_is_one_line(reference):
    with pytest.raises(CaptureError, match=r"^<lambda>: KeyError: 'weight'$"):
        compare(reference, (port, weights(reference)), (X,), convert=lambda state: state["weight"])
    with pytest.raises(CaptureError, match=r"^none: the candidate has no such parameter; it has 0.bias, 0.weight, "):
        compare(reference, (port, weights(reference)), (X,), convert=lambda state: {"none": X})
    with pytest.raises(CaptureError, match=r"^0.bias: the converter returns shape \(16, 6\), the candidate has \(9,\)"):
        compare(reference, (port, weights(reference)), (X,), convert=lambda state: {"0.bias": X})


def test_what_the_inputs_do_not_test_is_said():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.gain = nn.Parameter(torch.ones(6))
            self.other = nn.Parameter(torch.randn(3))

        def forward(self, tokens):
            return torch.where((tokens == 0)[..., None], 0.0, self.table(tokens) * self.gain)  # masked

    module = Masked().eval()
    full = compare(module, module, (np.array([[1, 2, 3], [4, 5, 6]]),), rounding=False)
    line = Masked.forward.__code__.co_firstlineno + 1
    assert list(full.coverage_gaps) == [
        "input 0: all rows have the same length, so padding was not tested",
        f"compare/test_comparison.py:{line}: the mask is the same everywhere",
        "other: no output depends on it",
        "all values are equal, so their order was not tested: gain",
    ]
    padded = compare(module, module, (np.array([[1, 2, 3], [4, 0, 0]]),), rounding=False)
    assert padded.coverage_gaps == full.coverage_gaps[2:]
    left = compare(module, module, (np.array([[1, 2, 3], [0, 0, 4]]),), rounding=False)
    assert left.coverage_gaps == full.coverage_gaps[2:]
    biased = nn.Linear(6, 3)
    zero = compare(biased, biased, (np.zeros((2, 6)),), rounding=False)
    assert list(zero.coverage_gaps) == ["input 0: is 0 everywhere, so products with it were not tested"]


def test_masks_of_one_line_and_many_constants():
    """A mask that varies once is tested; of many parameters the first are named, the others counted."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.gains = nn.ParameterList(torch.ones(6) for _ in range(8))

        def forward(self, x):
            for gain, mask in zip(self.gains, (x > 0, *[x > -9] * 7), strict=True):
                x = torch.where(mask, x * gain, 0.5 * x)
            return x

    module = Layers().eval()
    comparison = compare(module, module, (X,), rounding=False)
    names = ", ".join(f"gains.{i}" for i in range(6))
    assert list(comparison.coverage_gaps) == [
        f"all values are equal, so their order was not tested: {names} and 2 more"
    ]


def test_the_message_of_the_assertion(reference):
    twice = nn.Sequential(reference, nn.ReLU(), reference).eval()
    wrong = (lambda p, x: 2 * port(p, jnp.tanh(port(p, x)))), weights(reference)
    assert_same_function(reference, (port, weights(reference)), (X,), gradients=True)
    with pytest.raises(AssertionError) as info:
        assert_same_function(twice, wrong, (X,))
    first, *table = str(info.value).splitlines()
    assert re.fullmatch(r"different: compare/test_comparison\.py:\d+: tanh → relu, and 1 more", first)
    assert "mul" in "\n".join(table)
    assert max(map(len, table)) <= 100


def test_annotations_name_files_of_the_repository_and_escape(reference):
    def wrong(p, x):
        return jax.nn.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]

    comparison = compare(reference, (wrong, weights(reference)), (X,), rounding=False)
    (line,) = annotations(comparison, Path(__file__).parents[2])
    assert re.fullmatch(r"::error file=parity_tests/compare/test_comparison\.py,line=\d+,.*::.*should be tanh", line)
    (defect,) = comparison.forward.defects
    odd = replace(comparison, forward=replace(comparison.forward, defects=(replace(defect, note="100%,\n: two"),)))
    assert annotations(odd, Path(__file__).parents[2])[0].endswith("100%25,%0A: two")
    equal = compare(reference, reference, (X,), rounding=False)
    assert annotations(equal, Path.cwd()) == []
    undecided = replace(equal, forward=Diagnosis("undecided", reason="no output is finite"))
    assert annotations(undecided, Path.cwd()) == ["::error title=twinax compare::no output is finite"]


def test_the_document(reference):
    wrong = (lambda p, x: port(p, jnp.tanh(port(p, x))), weights(reference))
    twice = nn.Sequential(reference, nn.ReLU(), reference).eval()
    assert_same_function(reference, (port, weights(reference)), (X,), gradients=True)
    comparison = compare(twice, wrong, (X,))
    document = as_document(comparison)
    assert json.loads(json.dumps(document)) == document
    (defect,) = document["outputs"]["defects"]
    assert defect["repair"] == {"text": "tanh → relu", "parameter": ""}
    assert defect["error"] > 0.01
    assert (document["gradients"], document["rounding"]) == (None, [])
    assert len(grouped([*comparison.forward.defects] * 3)) == 1


def test_a_narrow_terminal_cuts_no_line_off(reference):
    comparison = compare(reference, (lambda p, x: jnp.sin(port(p, x)), weights(reference)), (X,), rounding=False)
    console = Console(width=48, file=io.StringIO())
    show(comparison, ("ref.py:make", "port.py:make"), console)
    (line,) = comparison.forward.defects[0].lines
    column = [row.split("│")[2].strip() for row in console.file.getvalue().splitlines() if row.startswith("│")]
    assert line in "".join(column)


# What the page describes as one field.
WHOLE = (
    "outputs.float32_constants",
    "gradients",
    "weights.matches",
    "weights.ambiguous",
    "weights.tied",
    "cost.seconds",
)


def fields(value, path=""):
    """The paths of all fields of a document."""
    if isinstance(value, dict) and path not in WHOLE:
        for name, inner in value.items():
            yield from fields(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and path not in WHOLE:
        yield from fields(value[0], f"{path}[]")
    else:
        yield path


def test_the_page_describes_every_field_of_the_document(reference):
    def adam(pairs):
        return torch.optim.Adam(pairs, lr=1e-3)

    optimizers = adam, optax.adam(1e-2)
    equal = compare(reference, (port, weights(reference)), (X,), gradients=True, optimizers=optimizers)
    wrong = compare(reference, (lambda p, x: jnp.sin(port(p, x)), weights(reference)), (X,))
    document = as_document(equal) | {"outputs": as_document(wrong)["outputs"]}
    assert document["gradients"].keys() == document["outputs"].keys()
    table = (Path(__file__).parents[2] / "docs" / "compare.md").read_text().split("## The JSON document")[1]
    described = set(re.findall(r"^\| `(.*?)` \|", table, flags=re.MULTILINE))
    # those with null or an empty list have a row of their own
    assert described - {"weights", "optimizer", "outputs.defects[].repair"} == set(fields(document))


def test_a_converter_tells_what_equal_values_do_not():
    """Two biases are zero; only the gradients show that the converter exchanges them."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).eval()
    nn.init.zeros_(module[0].bias)
    nn.init.zeros_(module[2].bias)

    def exchanged(state):
        return state | {"0.bias": state["2.bias"], "2.bias": state["0.bias"]}

    candidate = port, weights(module)
    assert compare(module, candidate, (X,), gradients=True, rounding=False).ok  # which is which is unknown
    assert compare(module, candidate, (X,), convert=dict, gradients=True, rounding=False).forward.weights.ok
    comparison = compare(module, candidate, (X,), convert=exchanged, gradients=True, rounding=False)
    assert (comparison.forward.verdict, comparison.verdict) == ("equal", "gradients different")


def test_errors_a_few_times_larger_are_more_than_rounding(reference):
    """A sum with a larger number loses bits, as a variance from the mean of squares does."""
    arrays = weights(reference)
    candidate = (lambda p, x: jnp.sqrt((port(p, x) + 8) ** 2) - 8), arrays
    comparison = compare(reference, candidate, (X,))
    assert 3 < comparison.rounding[0].ratio < 30
    assert comparison.verdict == "different in rounding"


def test_what_a_converter_leaves_out_is_listed(reference):
    candidate = port, weights(reference)
    comparison = compare(reference, candidate, (X,), convert=lambda s: {"0.weight": s["0.weight"]}, rounding=False)
    assert comparison.ok
    assert any(s.startswith("2.bias: not returned by the converter") for s in comparison.coverage_gaps)
    with pytest.raises(CaptureError, match="returns no arrays"):
        compare(reference, candidate, (X,), convert=lambda s: None)


def test_an_output_of_another_shape_is_equal_but_no_test_passes(reference):
    flat = (lambda p, x: port(p, x).reshape(-1)), weights(reference)
    comparison = compare(reference, flat, (X,), rounding=False)
    assert (comparison.verdict, len(comparison.forward.rearranged)) == ("equal", 1)
    with pytest.raises(AssertionError, match=r"output: shape \(96,\); the reference's is \(16, 6\)"):
        assert_same_function(reference, flat, (X,))


def test_models_in_bfloat16_and_inputs_of_jax(reference):
    module = nn.Linear(6, 3).bfloat16().eval()
    arrays = {name: np.asarray(tensor.detach().float()) for name, tensor in module.named_parameters()}
    linear = (lambda p, x: x @ p["weight"].T + p["bias"]), arrays
    assert compare(module, linear, (jnp.asarray(X),), convert=dict, rounding=False).verdict == "equal"
    with pytest.raises(CaptureError, match="pass a tuple"):
        compare(module, linear, X)


def test_gradients_that_cannot_be_traced_leave_the_outputs():
    def loop(p, x):
        return jax.lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y * 2 + jnp.abs(p["w"]), x)

    arrays, x = {"w": np.ones((2, 3))}, np.arange(6.0).reshape(2, 3)
    comparison = compare((loop, arrays), (loop, arrays), (x,), gradients=True, rounding=False)
    assert (comparison.forward.verdict, comparison.verdict) == ("equal", "gradients undecided")
    assert "while_loop" in comparison.backward.reason


@pytest.mark.parametrize("asked", [(), ("gradients",), ("optimizers",), ("gradients", "optimizers")])
def test_what_was_asked_for_and_not_compared_is_said(asked):
    """On the terminal, in the document and on the page; and nothing that nobody asked for."""
    weights, x = {"w": np.ones((3, 3))}, (np.arange(6.0).reshape(2, 3),)
    sides = (lambda p, x: jnp.tanh(x @ p["w"]), weights), (lambda p, x: jnp.sin(x @ p["w"]), weights)
    requests = {"gradients": True, "optimizers": (optax.sgd(0.1), optax.sgd(0.1))}
    comparison = compare(*sides, x, **{name: requests[name] for name in asked}, rounding=False)
    lines = [f"{name}, because the outputs differ" for name in asked]
    assert [line for line in as_document(comparison)["not_tested"] if "outputs differ" in line] == lines
    stream = io.StringIO()
    show(comparison, ("a", "b"), Console(file=stream, width=200))
    texts = str(comparison), stream.getvalue(), page(comparison, ("a", "b"))
    for text in texts:
        assert [name for name in requests if f"{name}, because the outputs differ" in text] == list(asked)


def test_gradients_that_are_undecided_say_why():
    def loop(p, x):
        return jax.lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y * 2 + jnp.abs(p["w"]), x)

    arrays, x = {"w": np.ones((2, 3))}, np.arange(6.0).reshape(2, 3)
    comparison = compare((loop, arrays), (loop, arrays), (x,), gradients=True, rounding=False)
    document = as_document(comparison)
    assert (document["equal"], document["gradients"]["verdict"]) == (False, "undecided")
    stream = io.StringIO()
    show(comparison, ("a", "b"), Console(file=stream, width=200))
    for text in (str(comparison), stream.getvalue(), page(comparison, ("a", "b")), document["gradients"]["reason"]):
        assert "while_loop" in text
