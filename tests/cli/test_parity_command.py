"""`twinax parity` on checkpoints and on text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from twinax import TransformerConfig, convert, flax_transformer
from twinax.convert import Checkpoint
from twinax.inference.translator import load
from twinax.parity import functions, ladder
from twinax.parity.functions import random_arrays
from twinax.parity.harness import compare_arrays
from twinax.parity.search.decoding import random_family
from twinax.parity.search.translations import show_translations
from twinax.parity.sentences import draw_from
from twinax.train.step import step

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
LETTERS = [" ".join(f"{i:b}".replace("0", "a").replace("1", "d")) for i in range(1, 120)]


@pytest.fixture
def checkpoint_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("src").write_text("\n".join([*LETTERS, "", LETTERS[0]]) + "\n")
    Path("tgt").write_text("\n".join([*LETTERS, "", LETTERS[0]]).upper() + "\n")
    Path("few").write_text("a b\nc\n")  # in float64 only, which is fast
    convert.save(convert.load(STORED), Path("same.pt"))


def test_two_forms_of_a_checkpoint_are_equal_on_text(command, checkpoint_files):
    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
    checkpoint = Checkpoint(config, random_arrays(config, 0), files=convert.load(STORED).files)
    convert.save(checkpoint, Path("a.pt"))
    convert.save(checkpoint, Path("b"))
    code, out, _ = command("parity", "a.pt", "b", "--src", "src", "--tgt", "tgt", "--json", "p.json")
    report = json.loads(Path("p.json").read_text())
    assert (code, report["equal"], report["differences"]) == (0, True, {}), out
    assert [rung["name"] for rung in report["rungs"]] == list(ladder.RUNGS)
    assert report["rungs"][5]["float32_ratio"] > 0
    assert report["command"] == "twinax parity a.pt b --src src --tgt tgt --seed 0"


def test_a_weight_that_differs_is_found(command, checkpoint_files):
    checkpoint = convert.load(STORED)
    name = "decoder.layers.0.feed_forward.inner_proj.kernel"
    changes = {name: np.nextafter(checkpoint.arrays[name], np.float32(9))}
    convert.save(replace(checkpoint, arrays={**checkpoint.arrays, **changes}, training=None), Path("other.safetensors"))
    code, out, _ = command(
        "parity", "same.pt", "other.safetensors", "--src", "few", "--json", "p.json", "--report", "p.html"
    )
    report = json.loads(Path("p.json").read_text())
    assert (code, report["equal"]) == (1, False)
    page = Path("p.html").read_text()
    assert "<code>other.safetensors</code> in Flax against <code>same.pt</code> in PyTorch" in page
    assert "✗</span> DIFFERENT" in page
    assert "decoder.layers.0.feed_forward.inner" in page
    verdicts = {rung["name"]: rung["ok"] for rung in report["rungs"]}
    assert (verdicts["masks"], verdicts["encoder"], verdicts["decoder"]) == (True, True, False)
    assert "computation order: decoder.layers.0.feed_forward" in out


def test_other_settings_of_equal_shapes_are_found(command, checkpoint_files):
    checkpoint = convert.load(STORED)
    config = checkpoint.config.replace(activation="gelu")
    convert.save(Checkpoint(config, checkpoint.arrays), Path("gelu.pt"))
    code, out, _ = command("parity", "same.pt", "gelu.pt", "--src", "few")
    assert (code, "DIFFERENT" in out) == (1, True)
    assert "computation order: encoder.layers.0.feed_forward" in out


def test_few_sentences_decide_in_float64_alone(command, checkpoint_files):
    code, out, err = command("parity", "same.pt", "--src", "few", "--json", "p.json")
    assert code == 0
    assert "Too few distinct sentences for float32 and bf16, which need at least" in out
    assert "twinax: few: only float64 is compared" in err
    assert "it has 2" in err
    rungs = json.loads(Path("p.json").read_text())["rungs"]
    assert {rung["float32_ratio"] for rung in rungs} == {None}


def test_batches_of_sentences():
    config = convert.load(STORED).config.replace(max_length=20)
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


def test_translations_are_compared_token_for_token(command, checkpoint_files):
    flags = ("--src", "few", "--translations", "--json", "p.json", "--report", "p.html")
    code, out, _ = command("parity", "same.pt", STORED, *flags)
    report = json.loads(Path("p.json").read_text())
    assert (code, report["equal"]) == (0, True), out
    assert [(t["beam_size"], t["search"], t["equal"], t["different"]) for t in report["translations"]] == [
        (1, "Flax", 2, {}),
        (5, "Flax", 2, {}),
    ]
    texts = load(STORED).translate(["a b", "c"])
    assert report["translations"][0]["tokens"] == sum(len(text.split()) + 1 for text in texts)  # and EOS
    page = Path("p.html").read_text()
    assert "✓</span> equal" in page
    assert "No translation differs beyond rounding." in page
    assert report["command"] in page
    assert re.search(r"source: (<code>a</code> <code>b</code>|<code>c</code>) <code>&lt;/s&gt;</code> </p>", page)
    assert re.search(r"target: <code>&lt;s&gt;</code> <code>[AC]</code>", page)


def test_a_translation_that_differs_decides_the_verdict(command, checkpoint_files, monkeypatch):
    """The ladder is equal; beam search in Flax forbids a token."""
    (token, *_), right = load(STORED).tokenizers.tgt.encode(["A"])[0], flax_transformer.generate

    def wrong(model, src, decoding):
        return right(model, src, replace(decoding, forbidden_ids=(token,)))

    monkeypatch.setattr(flax_transformer, "generate", wrong)
    code, out, _ = command("parity", "same.pt", "--src", "few", "--translations", "--json", "p.json")
    report = json.loads(Path("p.json").read_text())
    assert (code, report["equal"], out.splitlines()[-1]) == (1, False, "DIFFERENT")
    assert all(rung["ok"] for rung in report["rungs"])
    assert "beam 1, line 1, Flax: DIFFERENT" in out


def test_translations_that_differ_are_named_by_their_line(checkpoint_files, capsys):
    checkpoint = convert.load(STORED)
    embedding = checkpoint.arrays["src_embedding.embedding"].copy()
    a, b = load(STORED).tokenizers.tgt.encode(["A B"])[0]
    embedding[[a, b]] = embedding[[b, a]]
    other_checkpoint = replace(checkpoint, arrays={**checkpoint.arrays, "src_embedding.embedding": embedding})
    sources = dict(enumerate(load(STORED).tokenizers.src.encode_sources(["c d", "", "a b", "h"]), 1))
    del sources[2]
    equal, documents = show_translations(other_checkpoint.to_flax(), checkpoint.to_torch().eval(), sources)
    assert not equal
    assert [sorted(document["different"]) for document in documents] == [[3], [3]]
    assert [document["equal"] for document in documents] == [2, 2]
    assert "beam 5, line 3, Flax: DIFFERENT, margin" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_translations_of_a_directory_have_transformers_for_a_third(command, checkpoint_files):
    """A random Marian with another model's tokenizer, whose ids all exist in the vocabulary."""
    random_family("Marian", Path("marian"))
    for name, content in convert.load(STORED).files.items():
        Path("marian", Path(name).name).write_bytes(content)
    flags = ("--translations", "--max-length", "3", "--json", "p.json")
    code, out, _ = command("parity", "marian", "--src", "few", *flags)
    report = json.loads(Path("p.json").read_text())
    assert (code, report["equal"]) == (0, True), out
    assert report["command"].endswith(" --max-length 3 --seed 0 --translations")
    assert all(t["tokens"] <= 2 * 3 for t in report["translations"])
    assert [(t["search"], t["equal"]) for t in report["translations"]] == [("Flax", 2), ("transformers", 2)] * 2


SMALL = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1, d_model=16, d_ff=32)


def test_the_ladder_at_the_shape_of_a_training():
    result = ladder.run_ladder(SMALL, shape=(48, 9))
    assert result.ok
    assert (result.coverage.sentences, result.inputs) == (48, 1)  # as many sentences as in 24 random inputs of 2
    assert all(rung.float32_ratio is not None for rung in result.rungs if rung.name not in ("masks", "gradients"))


def test_at_a_shape_loss_and_gradients_are_those_of_the_train_step(monkeypatch):
    """A mistake in the train step alone is found. The config's dropout is ignored."""
    config = SMALL.replace(param_dtype="float64", compute_dtype="float64", ffn_dropout=0.5)
    batch = functions.random_batch(config, np.random.default_rng(0), 5, 9, 9)
    arrays = functions.random_arrays(config, 0)
    expected = functions.torch_function(config)(arrays, batch)
    for loss, differ in ((step.training_loss, False), (halved(step.training_loss), True)):
        functions.step_function.cache_clear()
        monkeypatch.setattr(step, "training_loss", loss)
        with jax.enable_x64(True):
            outputs = functions.step_function(config)(arrays, batch)
        report = compare_arrays(expected, outputs, criteria=ladder.CRITERIA, rung_of=ladder.rung_of)
        rungs = {finding.rung for finding in report.failures}
        assert rungs == ({"logits", "gradients"} if differ else set())
    functions.step_function.cache_clear()


def halved(loss):
    def compute(*arguments):
        total, tokens = loss(*arguments)
        return total / 2, tokens

    return compute


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("0x4", "must be SENTENCESxTOKENS with at least 2 sentences, for example 256x64"),
        ("8", "must be SENTENCESxTOKENS with at least 2 sentences, for example 256x64"),
        ("4x65", "the model's maximum is max_length=64 tokens"),
        ("9999999x64", "the ladder keeps all activations in float64 and needs about"),
    ],
)
def test_shapes_that_cannot_be_compared(shape, message, command):
    code, _, err = command("parity", "tiny", "--shape", shape)
    assert (code, err.count("\n")) == (2, 1)
    assert f"--shape {shape}: {message}" in err
