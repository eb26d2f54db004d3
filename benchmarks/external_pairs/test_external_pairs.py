"""The benchmark's own mistakes: each changes what it should and nothing else, and a correct pair raises no alarm."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from benchmarks.external_pairs import updates
from benchmarks.external_pairs.backward import gradient_sites
from benchmarks.external_pairs.converter import Converter, compared, mistakes
from benchmarks.external_pairs.forward import Checked
from benchmarks.external_pairs.gradients import has_effect
from benchmarks.external_pairs.layers import CONVERTED, LAYERS, equinox_mlp
from benchmarks.external_pairs.planting import planted_parameters
from twinax.compare.capture.models import capture
from twinax.compare.capture.parameters import arrays_of
from twinax.compare.comparison import compare
from twinax.compare.repair.diagnosis import diagnose_traces
from twinax.compare.rounding import compare_rounding
from twinax.compare.training.gradients import cotangents, diagnose_gradients
from twinax.compare.training.updates import compare_updates

PARAMETERS = {"w": np.random.default_rng(0).standard_normal((3, 4)), "b": np.random.default_rng(1).standard_normal(3)}
GRADIENTS = {name: np.random.default_rng(2).standard_normal(array.shape) for name, array in PARAMETERS.items()}


@pytest.fixture(scope="module")
def pair():
    return equinox_mlp()


@pytest.fixture(scope="module")
def traces(pair):
    return capture(pair.reference, pair.inputs), capture(pair.candidate, pair.inputs)


def operators(pair):
    sites = {}
    for site in gradient_sites(pair.candidate, pair.inputs):
        sites.setdefault(site.operator, site)
    return sites


def test_mistakes_change_gradients_and_no_outputs(pair, traces):
    factors = cotangents(*traces)[1]
    correct = capture(pair.candidate, pair.inputs, factors)
    sites = operators(pair)
    assert sites.keys() >= {
        "stop_gradient",
        "gradient halved",
        "input detached",
        "straight-through",
        "wrong derivative",
    }
    for operator, site in sites.items():
        planted = capture(site.model(), pair.inputs, factors)
        if operator == "NaN behind a mask":
            continue  # the only mask here is the same everywhere
        assert has_effect(correct, planted), site
        for name, number in planted.outputs.items():
            np.testing.assert_allclose(planted.values[number], traces[1].values[traces[1].outputs[name]], atol=1e-12)


def test_a_correct_pair_has_equal_gradients_and_a_mistake_is_named(pair, traces):
    outputs = diagnose_traces(*traces)
    inputs = pair.inputs, pair.inputs
    assert diagnose_gradients((pair.reference, pair.candidate), inputs, traces, outputs).verdict == "equal"
    for operator in ("stop_gradient", "wrong derivative", "parameter: not trained"):
        site = operators(pair)[operator]
        first, *_ = diagnose_gradients((pair.reference, site.model()), inputs, traces, outputs).defects
        assert site.line in first.lines, operator


def test_a_gradient_of_nan_is_named_where_it_begins():
    def port(parameters, x):
        y = x @ parameters["w"]
        return jnp.where(y > 0, jnp.sqrt(y), 0.0)  # NaN

    def reference(parameters, x):
        y = x @ parameters["w"]
        return torch.where(y > 0, torch.sqrt(torch.where(y > 0, y, 1.0)), 0.0)

    weights = {"w": np.random.default_rng(0).standard_normal((4, 3))}
    inputs = (np.random.default_rng(1).standard_normal((5, 4)),)
    models = (reference, {name: torch.from_numpy(array) for name, array in weights.items()}), (port, weights)
    both = capture(models[0], inputs), capture(models[1], inputs)
    diagnosis = diagnose_traces(*both)
    assert diagnosis.ok
    (defect,) = diagnose_gradients(models, (inputs, inputs), both, diagnosis).defects
    assert defect.note.startswith(f"external_pairs/test_external_pairs.py:{port.__code__.co_firstlineno + 2} ")


def test_buffers_have_no_gradient_to_compare():
    class Port(nnx.Module):
        def __init__(self, w, table):
            self.w, self.table = nnx.Param(w), nnx.Variable(table)

        def __call__(self, x):
            return x @ self.w[...] + self.table[...]

    class Reference(torch.nn.Module):
        def __init__(self, w, table):
            super().__init__()
            self.w = torch.nn.Parameter(torch.from_numpy(w))
            self.register_buffer("table", torch.from_numpy(table))

        def forward(self, x):
            return x @ self.w + self.table

    arrays = [np.random.default_rng(i).standard_normal((4, 4)) for i in range(3)]
    with jax.enable_x64(True):
        models = Reference(*arrays[:2]).eval(), Port(*map(jnp.asarray, arrays[:2]))
    inputs = (arrays[2],)
    both = capture(models[0], inputs), capture(models[1], inputs)
    outputs = diagnose_traces(*both)
    assert diagnose_gradients(models, (inputs, inputs), both, outputs).verdict == "equal"
    trained = lambda p, x: x @ p["w"] + p["table"], dict(zip(("w", "table"), arrays, strict=False))
    both = both[0], capture(trained, inputs)
    diagnosis = diagnose_traces(*both)
    (defect,) = diagnose_gradients((models[0], trained), (inputs, inputs), both, diagnosis).defects
    assert str(defect) == "table: no gradient in the reference, so it is not trained there"


def test_a_cast_to_a_narrow_dtype_is_named(pair, traces):
    def port(parameters, x):
        return jnp.tanh(x @ parameters["w"]).astype("bfloat16").astype(x.dtype) * 2

    def correct(parameters, x):
        return jnp.tanh(x @ parameters["w"]) * 2

    weights = {"w": np.random.default_rng(0).standard_normal((15, 9))}
    models, inputs = ((correct, weights), (port, weights)), (pair.inputs, pair.inputs)
    both = capture(models[0], pair.inputs), capture(models[1], pair.inputs)
    entry, *_ = compare_rounding(models, inputs, both, diagnose_traces(*both).weights)
    (cast,) = entry.casts
    assert not entry.ok
    assert cast.startswith("external_pairs/test_external_pairs.py:")


def test_rounding_is_measured_with_tied_parameters_in_torch():
    module = torch.nn.Sequential(torch.nn.Linear(15, 15, bias=False), torch.nn.Tanh(), torch.nn.Linear(15, 15)).eval()
    module[2].weight = module[0].weight
    arrays = {"w": module[0].weight.detach().numpy(), "b": module[2].bias.detach().numpy()}
    models = module, (lambda p, x: jnp.tanh(x @ p["w"].T) @ p["w"].T + p["b"], arrays)
    inputs = (np.random.default_rng(0).standard_normal((4, 15)),)
    both = capture(module, inputs), capture(models[1], inputs)
    for entry in compare_rounding(models, (inputs, inputs), both, diagnose_traces(*both).weights):
        assert not entry.failure
        assert entry.ok


@pytest.mark.parametrize("rule", updates.RULES)
def test_rules_of_both_frameworks_are_equal(rule):
    settings = updates.RULES[rule][1]
    reference = updates.torch_optimizer(rule, settings)
    assert compare_updates(reference, updates.optax_optimizer(rule, settings), PARAMETERS, GRADIENTS) == []
    frozen = updates.optax_optimizer(rule, {**settings, "frozen": "b"})
    (difference,) = compare_updates(reference, frozen, PARAMETERS, GRADIENTS)
    assert str(difference) == "b: trained: 1 in the reference, 0 in the candidate"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_parameter_that_a_converter_rounded_is_named(dtype, traces):
    reference, candidate = traces
    rounded = np.asarray(jnp.asarray(candidate.values[candidate.parameters["first.weight"]], dtype), np.float64)
    planted = planted_parameters(candidate, {"first.weight": rounded})
    first, *_ = diagnose_traces(reference, planted.trace).defects
    assert first.repair.parameter == "first.weight"


def converter_of(name):
    """A pair that was compared, its correct converter, and the reference's parameters."""
    pair = {**LAYERS, **CONVERTED}[name]()
    traces = capture(pair.reference, pair.inputs), capture(pair.candidate, pair.candidate_inputs or pair.inputs)
    checked = Checked(pair, traces, diagnose_traces(*traces), {})
    return checked, Converter(checked.diagnosis.weights.matches, arrays_of(pair.candidate)), arrays_of(pair.reference)


@pytest.mark.parametrize("name", ["Linen convolutions", "Equinox attention", *CONVERTED])
def test_a_converter_without_a_mistake_is_correct_and_a_mistake_changes_its_parameters(name):
    checked, converter, state = converter_of(name)
    pair, correct = checked.pair, converter(state)
    assert correct.keys() == converter.own.keys()
    for parameter, array in correct.items():
        np.testing.assert_allclose(array, converter.own[parameter], rtol=1e-7)
    assert (
        compare(pair.reference, pair.candidate, *checked.inputs, convert=converter, rounding=False).verdict == "equal"
    )
    for mistake in mistakes(converter, state):
        wrong = mistake.change(correct, state)
        assert wrong.keys() == set(mistake.parameters), mistake
        for parameter, array in wrong.items():
            assert array.shape == correct[parameter].shape, mistake
            assert not np.array_equal(array, correct[parameter]), mistake


@pytest.mark.parametrize(
    ("name", "operator", "detail"),
    [
        ("padded, shifted, added", "shift forgotten", "scale"),
        ("padded, shifted, added", "sum without one term", "bias without layer.bias_hh_l0"),
        ("padded, shifted, added", "no square matrix transposed", "2 of them"),
        ("padded, shifted, added", "forgotten", "inputs"),
        ("Linen convolutions", "reshaped, not transposed", "params.2.kernel"),
        ("Linen convolutions", "kernel flipped", "params.0.kernel"),
        ("Equinox attention", "rows off by one", "inner.key_proj.weight, rows moved by 1"),
        ("Equinox attention", "square matrix transposed", "inner.query_proj.weight"),
        ("Equinox GRU", "packed in another order", "cell.weight_hh, blocks 1 and 2 of 3"),
        ("Linen encoder layer, pre-norm", "unpacked in another order", "params.self_attn.key.kernel"),
    ],
)
def test_a_mistake_in_a_converter_is_named(name, operator, detail):
    checked, converter, state = converter_of(name)
    mistake = next(m for m in mistakes(converter, state) if m.operator == operator and m.detail.startswith(detail))
    comparison = compared(checked, converter, state, mistake)
    assert comparison.verdict == "different"
    (defect,) = comparison.forward.defects
    assert defect.repair.parameter in mistake.parameters


def test_the_diagnosis_needs_no_other_package_than_numpy_jax_and_torch():
    modules = ("flax", "optax", "equinox", "transformers", "datasets")
    code = "import sys, twinax.compare.comparison, twinax.compare.training.gradients, twinax.compare.rounding\n"
    code += f"print(*(name for name in {modules} if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"
