"""`twinax parity` on checkpoints and on text."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinax import TransformerConfig
from twinax.convert import Checkpoint
from twinax.parity_tests import ladder
from twinax.parity_tests.functions import random_arrays
from twinax.parity_tests.sentences import draw_from
from twinax.train import portable

STORED = Path(__file__).parent / "checkpoints" / "v1"
LETTERS = [" ".join(f"{i:b}".replace("0", "a").replace("1", "d")) for i in range(1, 120)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("src").write_text("\n".join([*LETTERS, "", LETTERS[0]]) + "\n")
    Path("tgt").write_text("\n".join([*LETTERS, "", LETTERS[0]]).upper() + "\n")
    Path("few").write_text("a b\nc\n")  # in float64 alone, which is quick
    portable.write(portable.read(STORED), Path("same.pt"))


def test_two_forms_of_a_checkpoint_are_equal_on_text(command, here):
    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
    checkpoint = Checkpoint(config, random_arrays(config, 0), files=portable.read(STORED).files)
    portable.write(checkpoint, Path("a.pt"))
    portable.write(checkpoint, Path("b"))
    code, out, _ = command("parity", "a.pt", "b", "--src", "src", "--tgt", "tgt", "--json", "p.json")
    found = json.loads(Path("p.json").read_text())
    assert (code, found["equal"], found["differences"]) == (0, True, {}), out
    assert [rung["name"] for rung in found["rungs"]] == list(ladder.RUNGS)
    assert found["rungs"][5]["float32_ratio"] > 0
    assert found["command"] == "twinax parity a.pt b --src src --tgt tgt --seed 0"


def test_a_weight_that_differs_is_found(command, here):
    checkpoint = portable.read(STORED)
    name = "decoder.layers.0.feed_forward.inner_proj.kernel"
    other = {name: np.nextafter(checkpoint.arrays[name], np.float32(9))}
    portable.write(replace(checkpoint, arrays={**checkpoint.arrays, **other}, training=None), Path("other.safetensors"))
    code, out, _ = command("parity", "same.pt", "other.safetensors", "--src", "few", "--json", "p.json")
    found = json.loads(Path("p.json").read_text())
    assert (code, found["equal"]) == (1, False)
    verdicts = {rung["name"]: rung["ok"] for rung in found["rungs"]}
    assert (verdicts["masks"], verdicts["encoder"], verdicts["decoder"]) == (True, True, False)
    assert "begins at decoder.layers.0.feed_forward" in out


def test_other_settings_of_equal_shapes_are_found(command, here):
    checkpoint = portable.read(STORED)
    config = checkpoint.config.replace(activation="gelu")
    portable.write(Checkpoint(config, checkpoint.arrays), Path("gelu.pt"))
    code, out, _ = command("parity", "same.pt", "gelu.pt", "--src", "few")
    assert (code, "DIFFERENT" in out) == (1, True)
    assert "begins at encoder.layers.0.feed_forward" in out


def test_few_sentences_decide_in_float64_alone(command, here):
    code, out, _ = command("parity", "same.pt", "--src", "few", "--json", "p.json")
    assert code == 0
    assert "Too few different sentences for float32 and bf16" in out
    rungs = json.loads(Path("p.json").read_text())["rungs"]
    assert {rung["float32_ratio"] for rung in rungs} == {None}


def test_batches_of_sentences():
    config = portable.read(STORED).config.replace(max_length=20)
    sources = [[5 + i % 9] * (1 + i % 25) + [2] for i in range(30)]
    targets = [[6, *s[:-1]] for s in sources]
    draw = draw_from([*sources, sources[0]], [*targets, targets[0]], config)
    batches = []
    while (batch := draw(1 + len(batches), 4)) is not None:
        batches.append(batch)
    batches.append(draw(0, ladder.TEXT_SENTENCES))
    rows = [tuple(row) for batch in batches for row in batch.src_tokens.tolist()]
    assert len({tuple(id for id in row if id) for row in rows}) == len(rows) == 28
    assert {batch.src_tokens.shape[1] for batch in batches} <= {16, 20}
    for batch in batches:
        assert (batch.tgt_tokens[:, 0] == config.decoder_start_id).all()
        lengths = (batch.labels != config.pad_id).sum(1)
        assert (batch.labels[np.arange(len(lengths)), lengths - 1] == config.eos_id).all()
        assert ((batch.tgt_tokens != config.pad_id).sum(1) == lengths).all()
        for tgt, labels, n in zip(batch.tgt_tokens, batch.labels, lengths, strict=True):
            assert tgt[1:n].tolist() == labels[: n - 1].tolist()
    assert draw_from(sources[:3], targets[:3], config)(0, 4).src_tokens.shape[0] == 3
