"""Directories that Flax classes of `transformers` 4.55.4 saved; these classes and `transformers` 5 are the oracles."""

import json

import numpy as np
import pytest

from parity_tests.support.legacy_flax_files import FOLDER, MODELS, Outputs, measure, twin_logits
from twinax import convert
from twinax.convert.weight_files.reading import has_flax_weights

# `transformers` warns about weights that differ from their settings
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = {"bart_untied_bfloat16": "bfloat16", "mbart_float16": "float16"}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bart"])  # another BART is among them
def test_both_twins_are_the_flax_class(name, tmp_path):
    """The written tensors are also, bit for bit, those that `transformers` converted, and the same checkpoint."""
    row = measure(name, tmp_path)
    assert row.errors.keys() == {"Flax", "PyTorch", "transformers"}
    assert max(row.errors.values()) <= row.tolerance
    assert row.changes == []
    assert row.ok
    checkpoint, new = convert.load(FOLDER / name), convert.load(tmp_path / name)
    assert (has_flax_weights(FOLDER / name), has_flax_weights(tmp_path / name)) == (True, False)
    assert checkpoint.config.param_dtype == DTYPES.get(name, "float32")
    assert new.config == checkpoint.config
    assert convert.checksum(new.arrays) == convert.checksum(checkpoint.arrays)
    for document in ("config.json", "generation_config.json"):
        old_settings, settings = (json.loads((d / document).read_text()) for d in (FOLDER / name, tmp_path / name))
        assert settings == old_settings


def test_a_difference_is_seen(tmp_path):
    row = measure("pegasus", tmp_path)
    assert not row._replace(changes=["lm_head.weight"]).ok
    assert not row._replace(errors={"Flax": 1e-11}).ok
    assert not row._replace(errors={"Flax": float("nan")}).ok


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
