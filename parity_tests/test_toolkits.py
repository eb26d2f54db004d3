"""Checkpoints of other toolkits: `transformers` as an oracle with the same weights, and the way back."""

from dataclasses import replace

import numpy as np
import pytest

from parity_tests import toolkit_files
from twinax import convert
from twinax.parity.conversion import CRITERIA
from twinax.parity.functions import random_batch, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import rung_of

# `transformers` warns about changes in later versions
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", toolkit_files.FAIRSEQ)
def test_fairseq(name, tmp_path):
    row = toolkit_files.measure_fairseq(name, tmp_path)
    for report in row.reports:
        report.check()
    assert row.changes == ()
    assert row.ok


FAIRSEQ_MISTAKES = {
    "positions that count padding": {"position_counting": "all"},
    "positions from row 1": {"position_offset": 1, "position_table_length": 15},
    "padding of targets attended to": {"decoder_mask": "causal"},
    "no scale": {"embedding_scale": "none"},
    "a different activation": {"activation": "silu"},
}


@pytest.mark.parametrize("mistake", FAIRSEQ_MISTAKES)
def test_a_mistake_in_fairseq_s_settings_is_seen(mistake, tmp_path):
    """In PyTorch only, which needs no compilation."""
    model = toolkit_files.save_fairseq("fairseq, post-norm", tmp_path)
    checkpoint = convert.load(tmp_path)
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    batch.src_tokens[0, 3] = batch.tgt_tokens[0, 2] = config.pad_id
    expected = {"logits": toolkit_files.fairseq_oracle(model, checkpoint)(batch)["logits"]}
    arrays = {name: a.astype(np.float64) for name, a in checkpoint.arrays.items()}
    wrong_config = replace(config, **FAIRSEQ_MISTAKES[mistake])
    for run_config, equal in ((config, True), (wrong_config, False)):
        outputs = {"logits": torch_function(run_config, gradients=False)(arrays, batch)["logits"]}
        assert compare_arrays(expected, outputs, criteria=CRITERIA, rung_of=rung_of).ok == equal
