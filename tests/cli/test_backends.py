"""Beam search in several backends: equal ones agree, changed ones are reported, and ties count as rounding."""

import dataclasses
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from twinax import TransformerConfig, convert
from twinax.backend.errors import ConfigError
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.convert import Checkpoint
from twinax.formulas.padding import pad
from twinax.parity.functions import random_arrays
from twinax.parity.search import backends
from twinax.parity.search.backends import compare_backends, load_searches
from twinax.parity.search.ctranslate2 import COMMON_RULES, translate_options

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
CONFIG = TransformerConfig(
    src_vocab_size=31,
    tgt_vocab_size=29,
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=9,
)
SOURCES = {line: [3 + (7 * line + i * i) % 28 for i in range(1 + line % 6)] + [2] for line in range(1, 25)}


def checkpoint(config=CONFIG, end=2.0):
    """A random model, whose EOS is likely: sentences have many lengths."""
    arrays = random_arrays(config, 3)
    arrays["output.proj.kernel"] = arrays["output.proj.kernel"] * np.float32(3)
    arrays["output.bias"][config.eos_id] += np.float32(end)
    return Checkpoint(config, arrays)


def compare(tmp_path, model, *names, sources=SOURCES, beam_size=4):
    searches, missing = load_searches(model, names, tmp_path)
    assert missing == {}
    return compare_backends(model, searches, sources, beam_size)


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(forced_bos_id=7, decoder_start_id=2)])
@pytest.mark.parametrize("beam_size", [1, 4])
def test_ctranslate2_and_pytorch_return_the_same_lists(beam_size, config, tmp_path):
    agreements = compare(tmp_path, checkpoint(config), "torch", "ctranslate2", beam_size=beam_size)
    for agreement in agreements:
        assert (agreement.equal, agreement.certificates, agreement.ok) == (24, [], True)
        assert 0 < agreement.score_error < 1e-4


def test_truncated_hypotheses_are_equal_too(tmp_path):
    """EOS is unlikely, and the maximum is shorter than the model's."""
    model = checkpoint(end=-5)
    searches, _ = load_searches(model, ["ctranslate2"], tmp_path)
    (agreement,) = compare_backends(model, searches, SOURCES, 3, max_length=5)
    assert (agreement.equal, agreement.ok) == (24, True)


def test_sequences_are_forbidden_as_in_pytorch(tmp_path):
    """Here the pairs of tokens of every second translation."""
    searches, _ = load_searches(checkpoint(), ["torch", "ctranslate2"], tmp_path)
    src = pad([*SOURCES.values()], CONFIG.pad_id, dtype=np.int64)
    fields = {"beam_size": 3, "n_best": 3, **COMMON_RULES}
    free = searches["torch"](src, DecodingConfig(**fields)).sentences()
    pairs = {pair for best, *_ in free[::2] for pair in pairwise(best)}
    decoding = DecodingConfig(forbidden_sequences=tuple(sorted(pairs)), **fields)
    expected, actual = (searches[name](src, decoding) for name in ("torch", "ctranslate2"))
    assert expected.sentences() != free
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_allclose(actual.scores, expected.scores, rtol=0, atol=1e-4)


WRONG_OPTIONS = {
    "length excludes EOS": {"return_end_token": False},
    "smaller beam": {"beam_size": 4, "patience": 0.5, "num_hypotheses": 2},
    "patience": {"patience": 3},
    "padding is allowed": {"suppress_sequences": None},
    "length penalty": {"length_penalty": 0.2},
    "shorter": {"max_decoding_length": 5},
    "EOS forbidden at first": {"min_decoding_length": 2},
}


SAME_LISTS = ("padding is allowed", "EOS forbidden at first")  # here, only their scores differ


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_each_option_that_is_wrong_is_a_difference(name, tmp_path, monkeypatch):
    """With the reason: the reference's margin is far above what rounding does."""

    def wrong(model, decoding, tokens):
        return translate_options(model, decoding, tokens) | WRONG_OPTIONS[name]

    monkeypatch.setattr(backends, "translate_options", wrong)
    (agreement,) = compare(tmp_path, checkpoint(), "ctranslate2")
    assert not agreement.ok
    assert bool(agreement.different) == (name not in SAME_LISTS)
    for certificate in agreement.different:
        assert certificate.margin > certificate.bound > 0
        assert "DIFFERENT" in str(certificate)


def test_ties_are_rounding(tmp_path):
    """Two tokens that are one: either order of equal hypotheses is right."""
    model = checkpoint()
    for name in ("output.proj.kernel", "output.bias"):
        model.arrays[name][..., 9] = model.arrays[name][..., 8]
    model.arrays["output.bias"][8:10] += np.float32(2)
    model.arrays["tgt_embedding.embedding"][9] = model.arrays["tgt_embedding.embedding"][8]
    searches, _ = load_searches(model, ["torch"], tmp_path)
    swap = np.array([*range(8), 9, 8, *range(10, 29)])

    def swapped(src, decoding):
        decoded = searches["torch"](src, decoding)
        return decoded._replace(tokens=swap[decoded.tokens])

    (agreement,) = compare_backends(model, {"swapped": swapped}, SOURCES, 4)
    assert agreement.certificates
    assert not agreement.different
    first = agreement.certificates[0]
    assert first.sums[0] == pytest.approx(first.sums[1], abs=1e-9)
    assert "within rounding" in str(first)


OTHER_SEARCHES = {
    "length_penalty": "gnmt",
    "min_length_ratio": 0.5,
    "max_length_ratio": 2.0,
    "force_end": True,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "renormalize": False,
    "early_stopping": False,
    "ended": "stay",
    "beam_groups": 2,
    "sampling": SamplingConfig(),
}


@pytest.mark.parametrize("name", OTHER_SEARCHES)
def test_another_search_is_refused(name):
    fields: dict = COMMON_RULES | {"beam_size": 2, name: OTHER_SEARCHES[name]}
    fields |= {"diversity_penalty": 1.0} if name == "beam_groups" else {}
    fields |= {"early_stopping": False} if name in ("ended", "sampling") else {}
    with pytest.raises(ConfigError, match=rf"[ ;]{name}=.*: must be "):
        translate_options(CONFIG, DecodingConfig(**fields), [])


CONVERTED = {
    "beam_size",
    "n_best",
    "length_exponent",
    "min_length",
    "max_length",
    "forbidden_ids",
    "allow_padding",
    "forbidden_sequences",
}
WITHOUT_EFFECT = {"diversity_penalty", "log_linear", "cache"}  # without groups, of one model, on the result


def test_every_field_of_the_search_is_converted_or_refused():
    fields = {field.name for field in dataclasses.fields(DecodingConfig)}
    assert fields == {*OTHER_SEARCHES} | CONVERTED | WITHOUT_EFFECT


def test_options_follow_the_search():
    names = [f"<{i}>" for i in range(29)]
    decoding = DecodingConfig(
        beam_size=3,
        n_best=2,
        min_length=2,
        length_exponent=0.5,
        forbidden_ids=(5,),
        forbidden_sequences=((6, 7),),
        **COMMON_RULES,
    )
    assert translate_options(CONFIG, decoding, names) == {
        "beam_size": 3,
        "num_hypotheses": 2,
        "length_penalty": 0.5,
        "max_input_length": 0,
        "max_decoding_length": 9,
        "min_decoding_length": 1,
        "return_end_token": True,
        "return_scores": True,
        "suppress_sequences": [["<5>"], ["<0>"], ["<6>", "<7>"]],
    }


@pytest.fixture
def text_model(tmp_path, monkeypatch):
    """A model with a tokenizer of letters, and texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    config = CONFIG.replace(src_vocab_size=101, tgt_vocab_size=103)
    convert.save(replace(checkpoint(config), files=convert.load(STORED).files), "model.pt")
    Path("src").write_text("a b\nb a\n\na a b b\n")
    Path("empty").write_text("\n\n")


def test_the_command_compares_and_names_what_is_missing(command, text_model, monkeypatch):
    flags = ("parity", "model.pt", "--backends", "torch,transformers,ctranslate2", "--src", "src", "--json", "e.json")
    code, out, _ = command(*flags)
    assert (code, out.splitlines()[-1]) == (0, "equal, without transformers")
    assert "transformers: has no family with this model, of marian, bart" in out
    report = json.loads(Path("e.json").read_text())
    rows = [(row["beam_size"], row["backend"], row["equal"]) for row in report["backends"]]
    assert rows == [(beam, backend, 3) for beam in (1, 5) for backend in ("torch", "ctranslate2")]
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    code, out, _ = command("parity", "model.pt", "--backends", "torch,ctranslate2", "--src", "src")
    assert (code, "ctranslate2: is not installed; pip install ctranslate2" in out) == (0, True)


def test_rounded_weights_are_said_to_be(command, text_model):
    convert.save(convert.load("model.pt"), "int8", layout="ctranslate2", quantization="int8")
    code, out, _ = command("parity", "int8", "--backends", "torch", "--src", "src")
    assert (code, out.splitlines()[-1]) == (0, "equal")
    assert "int8 is a CTranslate2 directory, int8: all backends computed in float32 with the rounded weights" in out


def test_the_flag_bounds_the_length(command, text_model, monkeypatch):
    lengths, right = [], backends.translate_options
    monkeypatch.setattr(backends, "translate_options", lambda *a: lengths.append(a[1].max_length) or right(*a))
    flags = ("parity", "model.pt", "--backends", "ctranslate2", "--src", "src", "--max-length", "2")
    assert (command(*flags)[0], {*lengths}) == (0, {2})


def test_the_command_fails_if_an_engine_differs(command, text_model, monkeypatch):
    right = backends.translate_options
    monkeypatch.setattr(
        backends, "translate_options", lambda *arguments: right(*arguments) | {"max_decoding_length": 1}
    )
    code, out, _ = command("parity", "model.pt", "--backends", "ctranslate2", "--src", "src")
    assert (code, out.splitlines()[-1]) == (1, "DIFFERENT")
    assert "beam 5, ctranslate2, line 1: DIFFERENT: hypothesis 2, diverges at token 2" in out


INVALID = {
    "no such backend": (
        ("model.pt", "--backends", "torch,marian", "--src", "src"),
        "'marian' is not a backend; choose",
    ),
    "no text": (("model.pt", "--backends", "torch"), "--backends torch: needs --src"),
    "a preset": (("tiny", "--backends", "torch", "--src", "src"), "compares one checkpoint"),
    "a report": (("model.pt", "--backends", "torch", "--src", "src", "--report", "r.html"), "compares one checkpoint"),
    "two": (("model.pt", "--backends", "torch", "--src", "src", "--translations"), "compares one checkpoint"),
    "nothing to compare": (
        ("model.pt", "--backends", "transformers", "--src", "src"),
        "--backends transformers: nothing to compare: transformers has no family with this model, of marian, bart",
    ),
    "no adapter": (
        ("model.pt", "--backends", "torch", "--src", "src", "--adapter", "src"),
        "the adapter src is merged into the Hugging Face directory of",
    ),
    "no length": (("model.pt", "--backends", "torch", "--src", "src", "--max-length", "0"), "max_length=0: must be"),
    "empty": (("model.pt", "--backends", "torch", "--src", "empty"), "empty: has no sentence"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_input_gets_one_line(name, command, text_model):
    arguments, message = INVALID[name]
    code, _, err = command("parity", *arguments)
    assert (code, message in err, len(err.splitlines())) == (2, True, 1)
