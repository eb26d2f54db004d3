"""Directories that Flax classes of `transformers` 4.55.4 saved; these classes and `transformers` 5 are the oracles."""

import json

import numpy as np
import pytest

from parity_tests.legacy_flax_files import FOLDER, MODELS, Outputs, different_tensors, transformers_logits, twin_logits
from twinax import convert
from twinax.convert.files import has_flax_weights

# `transformers` warns about weights that differ from their settings
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = {"bart_untied_bfloat16": "bfloat16", "mbart_float16": "float16"}


@pytest.mark.parametrize("name", MODELS)
def test_both_twins_are_the_flax_class(name):
    outputs, checkpoint = Outputs.of(name), convert.load(FOLDER / name)
    assert checkpoint.config.param_dtype == DTYPES.get(name, "float32")
    logits = twin_logits(checkpoint, outputs.src, outputs.tgt, "float64")
    logits["transformers"] = transformers_logits(FOLDER / name, checkpoint, outputs.src, outputs.tgt)
    tolerance = 1e-12 * max(1, np.abs(outputs.float64).max())
    for framework, values in logits.items():
        np.testing.assert_allclose(values, outputs.float64, rtol=0, atol=tolerance, err_msg=framework)


def test_in_float32_the_twins_round_as_little_as_the_flax_classes():
    """Errors against float64 as a share of the largest logit, over 27 sentences and 4,185 logits."""
    errors: dict = {"Flax": [], "PyTorch": [], "transformers": []}
    for name in MODELS:
        outputs = Outputs.of(name)
        logits = twin_logits(convert.load(FOLDER / name), outputs.src, outputs.tgt, "float32")
        for framework, values in (logits | {"transformers": outputs.float32}).items():
            assert values.dtype == np.float32
            errors[framework].append((values - outputs.float64) / np.abs(outputs.float64).max())
    rms = {framework: np.sqrt(np.mean(np.square(np.concatenate(parts)))) for framework, parts in errors.items()}
    assert rms["Flax"] <= 1.5 * rms["transformers"]
    assert rms["PyTorch"] <= 1.5 * rms["transformers"]


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_that_transformers_converted(name, tmp_path):
    """Bit for bit, and the written directory is the same checkpoint."""
    checkpoint = convert.load(FOLDER / name)
    assert different_tensors(checkpoint, Outputs.of(name), tmp_path / "new") == []
    new = convert.load(tmp_path / "new")
    assert (has_flax_weights(FOLDER / name), has_flax_weights(tmp_path / "new")) == (True, False)
    assert new.config == checkpoint.config
    assert convert.checksum(new.arrays) == convert.checksum(checkpoint.arrays)
    for document in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "new" / document).read_text()) == json.loads(
            (FOLDER / name / document).read_text()
        )
