"""The full ladder on the presets, including float32 and bfloat16; and the key bias' zero gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinax import TransformerConfig
from twinax.flax_transformer.inputs import float64_is_on
from twinax.parity import ladder
from twinax.parity.functions import flax_function, random_arrays, random_batch, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.report import as_document, show_ladder


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "small", "base"])
@pytest.mark.parametrize("seed", [0, 1])
def test_preset(preset, seed):
    """Slow; the fast suite runs the ladder on `tiny` in the test of the command."""
    result = ladder.run_ladder(TransformerConfig.preset(preset), seed)
    result.report.check()
    assert [rung for rung in result.rungs if not rung.ok] == []
    assert [rung.name for rung in result.rungs] == list(ladder.RUNGS)
    assert result.ok


@pytest.mark.parametrize("preset", ["tiny", pytest.param("small", marks=pytest.mark.slow)])
def test_eager_is_the_same_function(preset):
    """Without jit, with dropout on, including gradients."""
    one_layer = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig.preset(preset, param_dtype="float64", compute_dtype="float64", **one_layer)
    # One length for both sides, because each new shape of an operation is compiled.
    batch = random_batch(config, np.random.default_rng(0), 3, 7, 7)._replace(dropout=(1, 2))
    arrays = random_arrays(config, 0)
    eager = flax_function(config).__wrapped__(*jax.tree.map(jnp.asarray, (arrays, batch)))
    compare_arrays(
        torch_function(config)(arrays, batch), eager, criteria=ladder.CRITERIA, rung_of=ladder.rung_of
    ).check()


def test_narrow_types_see_a_wrong_epsilon(monkeypatch):
    """An eps of 1e-6 instead of 1e-5 puts the float32 error ratio far outside its bound."""
    from twinax.torch_reference import layers

    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
    norms = {
        **layers.NORMS,
        "layer_norm": lambda x, eps: layers.layer_norm(x, eps / 10 if x.dtype.itemsize == 4 else eps),
    }
    monkeypatch.setattr(layers, "NORMS", norms)
    monkeypatch.setattr(ladder, "POOLED", 4)
    result = ladder.run_ladder(config)
    float32_ratios = {rung.name: rung.float32_ratio for rung in result.rungs if not rung.ok}
    assert float32_ratios.keys() >= {"sublayers", "encoder", "logits"}
    assert float32_ratios["logits"] < 1 / 3  # Flax' error over PyTorch's, which is the larger one
    assert result.report.ok
    assert not result.ok


def test_a_failed_rung_names_the_lines_that_differ(monkeypatch, capsys):
    """The table is the one of `twinax compare`."""
    from twinax.torch_reference import layers

    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
    wrong = {**layers.NORMS, "layer_norm": lambda x, eps: layers.layer_norm(x, 0.1)}
    monkeypatch.setattr(layers, "NORMS", wrong)
    monkeypatch.setattr(ladder, "_ratios", lambda *_: {})  # float64 is enough
    result = show_ladder("a wrong epsilon", config)
    (defect,) = as_document(result)["comparison"]["outputs"]["defects"]
    assert defect["repair"]["text"] == "add: 1e-05 → 0.1"
    assert defect["occurrences"] == 7
    assert [line.partition(":")[0] for line in defect["lines"]] == ["flax_transformer/layers.py"]
    out = " ".join(capsys.readouterr().out.split())
    assert "Where the models diverge (candidate: Flax, reference: PyTorch): outputs" in out
    assert "add: 1e-05 → 0.1" in out
    assert result.comparison.backward is None


def test_a_gradient_that_stops_names_its_line(monkeypatch):
    """The outputs are equal, so the gradients are compared."""
    from twinax.flax_transformer import layers

    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1, positions="learned")
    wrong = {**layers.ACTIVATIONS, "relu": lambda x: jax.lax.stop_gradient(jax.nn.relu(x))}
    monkeypatch.setattr(layers, "ACTIVATIONS", wrong)
    monkeypatch.setattr(ladder, "_ratios", lambda *_: {})
    flax_function.cache_clear()  # programs are compiled once per config
    try:
        result = ladder.run_ladder(config)
    finally:
        flax_function.cache_clear()
    assert [rung.name for rung in result.rungs if not rung.ok] == ["gradients"]
    (defect, *_) = result.comparison.backward.defects
    assert str(defect.repair) == "without stop_gradient"
    assert defect.lines[0].startswith("ladder/test_ladder.py:")


def test_too_few_inputs_prove_nothing(monkeypatch):
    """Without a usable draw every rung fails: an empty column must not count as equal."""
    monkeypatch.setattr(ladder, "MAX_DRAWS", 2)
    monkeypatch.setattr(ladder, "rounding_crosses_relu", lambda *_: True)
    result = ladder.run_ladder(TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1))
    assert not any(rung.ok for rung in result.rungs)
    assert result.report.ok
    assert result.comparison is None  # float64 has no difference to look for


def test_key_bias_gradient_is_zero_in_both():
    one_layer = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig.preset("tiny", param_dtype="float64", compute_dtype="float64", **one_layer)
    batch = random_batch(config, np.random.default_rng(0), 3, 7, 5)
    for function in (torch_function(config), flax_function(config)):
        outputs = {k: np.asarray(v) for k, v in function(random_arrays(config, 0), batch).items()}
        grads = {k: np.abs(v).max() for k, v in outputs.items() if k.startswith("gradients.")}
        largest = max(grads.values())
        key_biases = {k: g for k, g in grads.items() if k.endswith("k_proj.bias")}
        assert key_biases
        assert all(g <= 1e-10 * largest for g in key_biases.values())
        assert all(g > 1e-10 * largest for k, g in grads.items() if k not in key_biases)


def test_climbing_does_not_switch_float64_on_or_off():
    assert float64_is_on()
    with jax.enable_x64(False):
        ladder.run_ladder(TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)).report.check()
        assert not float64_is_on()
