"""Checkpoints of other toolkits: `transformers` as an oracle with the same weights, and the way back."""

from dataclasses import replace

import numpy as np
import pytest

from parity_tests.support import fairseq_files, marian_files
from parity_tests.support.conversion import CRITERIA
from twinax import convert
from twinax.formulas.position_tables import POSITION_TABLES
from twinax.parity.functions import random_batch, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import run_twins, rung_of

# `transformers` warns about changes in later versions
pytestmark = pytest.mark.filterwarnings("ignore")


MEASURES: dict = dict.fromkeys(fairseq_files.FAIRSEQ, fairseq_files.measure_fairseq)
MEASURES |= dict.fromkeys(marian_files.MARIAN, marian_files.measure_marian)
IN_FLAX = ("fairseq, post-norm",)  # compiling takes long, and other tests compare the twins; Marian's: CTranslate2


def run_torch(config, arrays, batch):
    return {"PyTorch": torch_function(config)(arrays, batch)}


@pytest.mark.parametrize("name", MEASURES)
def test_variant(name, tmp_path):
    row = MEASURES[name](name, tmp_path, run_twins if name in IN_FLAX else run_torch)
    assert len(row.reports) == 1 + (name in IN_FLAX)
    for report in row.reports:
        report.check()
    assert row.changes == ()
    assert row.ok


MARIAN_MISTAKES = {
    "the positions of transformers' Marian": {"positions": "sinusoidal_half"},
    "its eps": {"norm_eps": 1e-5},
    "a final norm": {"norm_placement": "pre"},
    "no scale": {"embedding_scale": "none"},
}


@pytest.mark.parametrize("mistake", MARIAN_MISTAKES)
def test_a_mistake_in_marian_s_options_is_seen(mistake, tmp_path):
    model = marian_files.save_marian("Marian .npz", tmp_path / "x.npz")
    checkpoint = convert.load(tmp_path / "x.npz")
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64", max_length=13)
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    batch.tgt_tokens[:, 0] = config.decoder_start_id
    expected = marian_files.marian_oracle("Marian .npz", model, checkpoint)(batch)["logits"][..., : marian_files.SIZE]
    arrays = {name: a.astype(np.float64) for name, a in checkpoint.arrays.items() if not name.endswith(".table")}
    wrong_config = replace(config, **MARIAN_MISTAKES[mistake])
    for run_config, equal in ((config, True), (wrong_config, False)):
        table = POSITION_TABLES[run_config.positions](13, 12).astype(np.float32).astype(np.float64)
        tables = {f"{side}_input.positions.table": table for side in ("src", "tgt")}
        outputs = torch_function(run_config, gradients=False)({**arrays, **tables}, batch)["logits"]
        logits = {"logits": outputs[..., : marian_files.SIZE]}
        assert compare_arrays({"logits": expected}, logits, criteria=CRITERIA, rung_of=rung_of).ok == equal


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
    model = fairseq_files.save_fairseq("fairseq, post-norm", tmp_path)
    checkpoint = convert.load(tmp_path)
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    batch.src_tokens[0, 3] = batch.tgt_tokens[0, 2] = config.pad_id
    expected = {"logits": fairseq_files.fairseq_oracle(model, checkpoint)(batch)["logits"]}
    arrays = {name: a.astype(np.float64) for name, a in checkpoint.arrays.items()}
    wrong_config = replace(config, **FAIRSEQ_MISTAKES[mistake])
    for run_config, equal in ((config, True), (wrong_config, False)):
        outputs = {"logits": torch_function(run_config, gradients=False)(arrays, batch)["logits"]}
        assert compare_arrays(expected, outputs, criteria=CRITERIA, rung_of=rung_of).ok == equal
