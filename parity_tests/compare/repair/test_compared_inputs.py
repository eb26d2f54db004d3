"""Inputs and outputs of other kinds: batches by name, nested, complex numbers, padding at the start."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

from twinax.compare.capture.parameters import arrays_of
from twinax.compare.capture.trace import CaptureError
from twinax.compare.comparison import compare
from twinax.compare.matching.weights import match_weights

IDS = np.array([[0, 0, 5, 6, 7], [3, 9, 11, 12, 2]])  # padding at the start


class Pooled(nn.Module):
    """The mean of the embeddings that are not masked; outputs are nested."""

    def __init__(self, width=4, square=4):
        super().__init__()
        self.embed, self.out = nn.Embedding(13, width), nn.Linear(width, square)

    def forward(self, ids, mask, scale=None, *, unused=False):
        x = self.embed(ids) * mask[..., None]
        x = x.sum(1) / mask.sum(1, keepdim=True)
        return {"pooled": self.out(x if scale is None else x * scale["by"]), "states": (x,)}


def pooled(p, mask, ids, scale=None):
    """The port, which takes the inputs in another order."""
    x = p["embed.weight"][ids] * mask[..., None]
    x = x.sum(1) / mask.sum(1, keepdims=True)
    scaled = x if scale is None else x * scale["by"]
    return {"states": (x,), "pooled": scaled @ p["out.weight"].T + p["out.bias"]}


def batch():
    return {"ids": IDS, "mask": (IDS != 0).astype(np.float64), "scale": {"by": np.array([2.0, 3.0, 4.0, 5.0])}}


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Pooled().eval()


def weights_of(module):
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def test_a_batch_is_passed_by_name_to_both(module):
    assert compare(module, (pooled, weights_of(module)), batch()).verdict == "equal"
    for name, other in (("ids", IDS + 1), ("scale", {"by": np.ones(4)})):
        undecided = compare(module, (pooled, weights_of(module)), batch(), {**batch(), name: other}, rounding=False)
        place = {"ids": "ids", "scale": "scale.by"}[name]
        assert undecided.forward.reason == f"input {place} differs between the candidate and the reference"


def test_a_function_of_the_whole_batch_gets_it(module):
    port = lambda p, inputs: pooled(p, inputs["mask"], inputs["ids"], inputs["scale"])  # noqa: E731
    assert compare(module, (port, weights_of(module)), batch()).verdict == "equal"


def test_what_is_taken_by_keyword_only_is_one_line(module):
    with pytest.raises(
        CaptureError, match="input unused: the model takes it by keyword only; it takes ids, mask, scale"
    ):
        compare(module, (pooled, weights_of(module)), {**batch(), "unused": True})


def test_outputs_that_one_side_has_alone_are_named(module):
    port = lambda p, ids, mask: pooled(p, mask, ids)["pooled"]  # noqa: E731
    comparison = compare(module, (port, weights_of(module)), (IDS, (IDS != 0).astype(float)), rounding=False)
    assert comparison.verdict == "equal"
    assert "output states.0 of the reference: the candidate has none for it" in comparison.coverage_gaps


def test_padding_at_the_start_counts(module):
    inputs = IDS, (IDS != 0).astype(float)
    port = lambda p, ids, mask: pooled(p, mask, ids)  # noqa: E731
    assert not any("padding" in s for s in compare(module, (port, weights_of(module)), inputs).coverage_gaps)
    full = np.full((2, 5), 3) + np.arange(5), np.ones((2, 5))
    assert any("padding" in s for s in compare(module, (port, weights_of(module)), full).coverage_gaps)


def test_a_parameter_that_the_port_alone_does_not_use_is_its_omission(module):
    def without(p, ids, mask):
        states = pooled(p, mask, ids)["states"]
        return {"pooled": states[0] @ p["out.weight"].T, "states": states}

    comparison = compare(module, (without, weights_of(module)), (IDS, (IDS != 0).astype(float)))
    assert "out.bias: the candidate does not use it; the reference uses out.bias" in comparison.coverage_gaps


def test_a_transposed_square_matrix_is_called_transposed(module):
    weights = weights_of(module)
    weights["out.weight"] = weights["out.weight"].T.copy()
    comparison = compare(module, (lambda p, i, m: pooled(p, m, i), weights), (IDS, (IDS != 0).astype(float)))
    (defect,) = comparison.forward.defects
    assert str(defect.repair) == "out.weight has the values of out.weight, transposed"


class Spectral(nn.Module):
    """A product in the frequencies, with complex parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * self.weight, n=x.shape[-1]), spectrum * self.weight


def spectral(p, x, norm=None, conjugate=False):
    weight = jnp.conj(p["weight"]) if conjugate else p["weight"]
    spectrum = jnp.fft.rfft(x, norm=norm) * weight
    return jnp.fft.irfft(spectrum, n=x.shape[-1]), spectrum


REPAIRS = {(): None, (("norm", "ortho"),): "without mul, input 1 alone", (("conjugate", True),): "without conj"}


@pytest.mark.parametrize("settings", REPAIRS)
def test_complex_numbers_are_compared(settings):
    torch.manual_seed(0)
    module = Spectral().eval()
    port = lambda p, x: spectral(p, x, **dict(settings))  # noqa: E731
    comparison = compare(
        module, (port, weights_of(module)), (np.random.default_rng(0).standard_normal((2, 3, 8)),), gradients=True
    )
    repairs = [str(defect.repair) for defect in comparison.forward.defects]
    assert repairs == ([REPAIRS[settings]] if settings else [])
    if not settings:
        assert comparison.backward.reason == "weight: gradients of complex parameters are not compared"
        assert all("complex numbers are compared in float64 only" in entry.failure for entry in comparison.rounding)


def test_an_imaginary_part_alone_is_a_difference():
    """Also in values with too few numbers to be identified."""
    parameters = {"w": np.array([[1.0 + 2.0j]])}
    same = lambda p, x: x * p["w"]  # noqa: E731
    other = lambda p, x: x * jnp.conj(p["w"])  # noqa: E731
    assert compare((same, parameters), (same, parameters), (np.array([[3.0]]),)).verdict == "equal"
    assert compare((same, parameters), (other, parameters), (np.array([[3.0]]),)).verdict == "different"


@pytest.mark.parametrize("kind", ["torch", "torch function", "jax"])
def test_the_callers_models_stay_as_they_are(module, kind):
    """A converter's parameters go into copies."""
    reference = module
    port = Pooled().eval()
    candidate = {
        "torch": port,
        "torch function": (lambda p, *a: torch.func.functional_call(port, p, a), dict(port.named_parameters())),
        "jax": (lambda p, ids, mask: pooled(p, mask, ids), weights_of(port)),
    }[kind]
    before = [{n: np.array(a) for n, a in arrays_of(model).items()} for model in (reference, candidate)]
    inputs = torch.tensor(IDS), torch.tensor(IDS != 0).double()
    comparison = compare(reference, candidate, inputs, convert=lambda state: dict(state), gradients=True)
    assert comparison.verdict == "equal"
    after = [arrays_of(model) for model in (reference, candidate)]
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    assert np.array_equal(inputs[0], IDS)


def test_inputs_by_name_may_leave_out_what_has_a_default(module):
    """What the model lacks, and what it needs, is one line."""
    named = {name: value for name, value in batch().items() if name != "mask"}
    optional = lambda p, ids, mask=None, scale=None: pooled(p, (IDS != 0).astype(float), ids, scale)  # noqa: E731
    port = optional, weights_of(module)
    assert compare(module, port, batch(), named, rounding=False).verdict == "equal"
    with pytest.raises(CaptureError, match=r"^input mask: the model needs it; the inputs are ids, scale$"):
        compare(module, port, named)
    with pytest.raises(CaptureError, match=r"^input labels: the model has no such parameter; it takes ids, mask"):
        compare(module, port, {**batch(), "labels": IDS})


def test_of_outputs_of_one_size_the_one_with_equal_numbers_is_compared():
    reference = (lambda p, x: {"hidden": x * p["w"], "logits": x + p["w"]}), {"w": torch.tensor([1.5, 2.0, 3.0])}
    logits = (lambda p, x: x + p["w"]), {"w": np.array([1.5, 2.0, 3.0])}
    comparison = compare(reference, logits, (np.random.default_rng(0).standard_normal((2, 3)),), rounding=False)
    assert comparison.verdict == "equal"
    assert comparison.coverage_gaps[0] == "output hidden of the reference: the candidate has none for it"


@pytest.mark.parametrize("tied", ["reference", "candidate"])
def test_what_is_equal_only_while_two_parameters_are_is_said(tied):
    arrays = {name: np.random.default_rng(0).standard_normal((5, 4)) for name in ("embed", "out")}
    functions = {
        True: lambda p, ids: p["embed"][ids] @ p["embed"].T,
        False: lambda p, ids: p["embed"][ids] @ p["out"].T,
    }
    reference = functions[tied == "reference"], {name: torch.tensor(array) for name, array in arrays.items()}
    port = functions[tied == "candidate"], arrays
    sentences = compare(reference, port, (IDS % 5,), rounding=False).coverage_gaps
    other = "candidate" if tied == "reference" else "reference"
    expected = f"embed and out: separate in the {other}, one parameter in the {tied}; equal only while their values are"
    assert expected in sentences
    one_under_two_names = dict.fromkeys(("embed", "out"), torch.tensor(arrays["embed"]))
    for others in (reference[1], one_under_two_names):
        own = (
            {name: tensor.numpy() for name, tensor in others.items()} if others is reference[1] else arrays | {"out": 0}
        )
        port = (functions[others is not reference[1]], own)
        both = compare((functions[False], others), port, (IDS % 5,), rounding=False)
        assert not any("separate" in sentence for sentence in both.coverage_gaps)


def _largest(p, x):
    return jnp.argmax(x @ p["w"] * -3, -1)  # mistake


def test_outputs_of_whole_numbers_have_their_lines_and_their_limits():
    w = np.random.default_rng(0).standard_normal((4, 4))
    x = np.random.default_rng(2).standard_normal((60, 4))
    reference = (lambda p, x: (x @ p["w"]).argmax(-1)), {"w": torch.tensor(w)}
    comparison = compare(reference, (_largest, {"w": w}), (x,), rounding=False)
    (defect,) = comparison.forward.defects
    line = inspect.getsourcelines(_largest)[1] + 1
    assert defect.lines == (f"repair/test_compared_inputs.py:{line}",)
    assert (str(defect.repair), comparison.forward.verified) == ("without mul", True)
    equal = compare(reference, ((lambda p, x: jnp.argmax(x @ p["w"] + 1e-6 * x, -1)), {"w": w}), (x,), rounding=False)
    assert equal.ok
    note = "output output: has no floating-point numbers, so a small difference before it was not tested"
    assert equal.coverage_gaps == (note,)


@pytest.mark.parametrize(
    ("port", "repair"),
    [
        (lambda p, x: x @ p["w"] >= 0.25, "None"),  # a number cannot be solved for
        (lambda p, x: -(x @ p["w"]) > 0, "gt → <"),
        (lambda p, x: (x @ p["w"] <= 0).T, "transpose: True and False swapped"),
    ],
)
def test_truth_values_that_differ_have_their_line(port, repair):
    arrays = {"w": np.random.default_rng(0).standard_normal((4, 5))}
    reference = (lambda p, x: x @ p["w"] > 0), {"w": torch.tensor(arrays["w"])}
    x = np.random.default_rng(1).standard_normal((6, 4))
    (defect,) = compare(reference, (port, arrays), (x,), rounding=False).forward.defects
    assert str(defect.repair) == repair
    equal = compare(reference, ((lambda p, x: (x @ p["w"] > 0).T), arrays), (x,), rounding=False)
    assert (equal.verdict, len(equal.forward.rearranged)) == ("equal", 1)


def test_an_output_computed_from_another_needs_no_note():
    arrays = {"w": np.random.default_rng(0).standard_normal((4, 5))}
    reference = (lambda p, x: (x @ p["w"], (x @ p["w"]).argmax(-1))), {"w": torch.tensor(arrays["w"])}
    alone = (lambda p, x: [y := x @ p["w"], y.argmax(-1)]), reference[1]
    inputs = (np.random.default_rng(1).standard_normal((6, 4)),)
    port = (lambda p, x: [x @ p["w"], jnp.argmax(x @ p["w"], -1)]), arrays
    assert len(compare(reference, port, inputs, rounding=False).coverage_gaps) == 1
    assert compare(alone, port, inputs, rounding=False).coverage_gaps == ()


def test_an_optimizer_that_cannot_be_run_is_said(module):
    sgd = lambda pairs: torch.optim.SGD(pairs, lr=0.1)  # noqa: E731
    comparison = compare(module, module, batch(), optimizers=(sgd, optax.lbfgs(0.1)), rounding=False)
    assert (comparison.verdict, comparison.update) == ("equal", None)
    assert comparison.coverage_gaps[0].startswith("optimizers, which cannot be run: TypeError: ")


def test_complex_parameters_are_told_apart_by_their_imaginary_parts():
    real, one, other = np.random.default_rng(0).standard_normal((3, 4, 5))
    reference = {"a": real + 1j * one, "b": real + 1j * other}
    weights = match_weights(reference, {"x": reference["b"].T, "y": reference["a"]})
    assert {name: match.sources for name, match in weights.matches.items()} == {"x": ("b",), "y": ("a",)}
    assert match_weights(reference, {"x": reference["a"].conj()}).unmatched == ("x",)
