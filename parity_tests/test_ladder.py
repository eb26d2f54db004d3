"""The whole ladder, float32 and bfloat16 included, on the presets; and that the key bias' zero gradient is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinax import TransformerConfig
from twinax.flax_transformer.inputs import float64_is_on
from twinax.parity import ladder
from twinax.parity.functions import flax_function, random_arrays, random_batch, torch_function
from twinax.parity.harness import compare_arrays


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "small", "base"])
@pytest.mark.parametrize("seed", [0, 1])
def test_preset(preset, seed):
    """The command's own test climbs the ladder of `tiny` each time."""
    found = ladder.run_ladder(TransformerConfig.preset(preset), seed)
    found.report.check()
    assert [rung for rung in found.rungs if not rung.ok] == []
    assert [rung.name for rung in found.rungs] == list(ladder.RUNGS)
    assert found.ok


@pytest.mark.parametrize("preset", ["tiny", pytest.param("small", marks=pytest.mark.slow)])
def test_eager_is_the_same_function(preset):
    """Outside jit, operation by operation, with dropout on; gradients included."""
    one_layer = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig.preset(preset, param_dtype="float64", compute_dtype="float64", **one_layer)
    batch = random_batch(config, np.random.default_rng(0), 3, 7, 5)._replace(dropout=(1, 2))
    arrays = random_arrays(config, 0)
    eager = flax_function(config).__wrapped__(*jax.tree.map(jnp.asarray, (arrays, batch)))
    compare_arrays(
        torch_function(config)(arrays, batch), eager, criteria=ladder.CRITERIA, rung_of=ladder.rung_of
    ).check()


def test_narrow_types_see_a_wrong_epsilon(monkeypatch):
    """An eps of 1e-6 for 1e-5 moves float32 far beyond the bound, as the design says it must."""
    from twinax.torch_reference import layers

    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
    wrong = {
        **layers.NORMS,
        "layer_norm": lambda x, eps: layers.layer_norm(x, eps / 10 if x.dtype.itemsize == 4 else eps),
    }
    monkeypatch.setattr(layers, "NORMS", wrong)
    found = ladder.run_ladder(config)
    worse = {rung.name: rung.float32_ratio for rung in found.rungs if not rung.ok}
    assert worse.keys() >= {"sublayers", "encoder", "logits"}
    assert worse["logits"] < 1 / 3  # Flax' error over PyTorch's, which is the larger one
    assert found.report.ok
    assert not found.ok


def test_too_few_inputs_prove_nothing(monkeypatch):
    """Where no draw counts, no rung holds: a column without numbers must not read as equal."""
    monkeypatch.setattr(ladder, "MAX_DRAWS", 2)
    monkeypatch.setattr(ladder, "rounding_crosses_relu", lambda *_: True)
    found = ladder.run_ladder(TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1))
    assert not any(rung.ok for rung in found.rungs)
    assert found.report.ok


def test_key_bias_gradient_is_zero_in_both():
    config = TransformerConfig.preset("tiny", param_dtype="float64", compute_dtype="float64")
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
