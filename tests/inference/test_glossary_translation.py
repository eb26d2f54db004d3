"""Translation with a glossary, in both frameworks and by the commands; the model is random."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import twinax
from twinax import TransformerConfig, convert
from twinax.backend.errors import DataError
from twinax.cli.flags.serve import Serve
from twinax.cli.text.serve_command import serve
from twinax.configs.data import TokenizerConfig
from twinax.configs.decoding import DecodingConfig
from twinax.convert.checkpoint import Checkpoint
from twinax.flax_transformer import Transformer
from twinax.flax_transformer.decoding.search import generate
from twinax.inference.ensemble import Ensemble
from twinax.inference.serving.app import Service
from twinax.inference.serving.engine import Task
from twinax.train.data.fitting import with_tokenizers
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.glossary import TAGS
from twinax.train.text.tokenization import train_tokenizer

PLAIN = Path(__file__).parents[1] / "checkpoints" / "v1"
TERMS = {"a": "C", "b c": "D", "h": "f f"}
TEXTS = ["a b c", "", "d e", "h f a", "g b", "a a a a a a"]  # with terms, the last one has more than 16 tokens
NUMBER = 10  # of terms in the texts
SEARCH, FLAGS = {"beam_size": 3, "max_length": 8}, ("--beam-size", "3", "--max-length", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = train_tokenizer(TokenizerConfig(kind="word", vocab_size=100, tags=TAGS), [*TEXTS, "A B C D E F G H"])
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = with_tokenizers(TransformerConfig.preset("small", **sizes, max_length=16), Tokenizers.of([tokenizer]))
    folder = tmp_path_factory.mktemp("glossary")
    tokenizer.save(folder / "tokenizer")
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    checkpoint = Checkpoint.of(Transformer(config, rngs=nnx.Rngs(3)))
    arrays = {name: 2 * array for name, array in checkpoint.arrays.items()}  # so that translations differ
    convert.save(replace(checkpoint, arrays=arrays, files=files), folder / "model.pt")
    return folder / "model.pt"


@pytest.fixture
def files(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("terms.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in TERMS.items()))
    Path("src").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path


@pytest.fixture(scope="module")
def translator(model):
    return twinax.load(model).with_glossary(TERMS)


def test_both_frameworks_read_the_terms(translator, model):
    """The same tokens, and those of beam search on the annotated ids."""
    decoding = DecodingConfig(**SEARCH, n_best=2)
    flax, torch = (translator.hypotheses(TEXTS, decoding, framework) for framework in ("flax", "torch"))
    assert [[h.tokens for h in n_best] for n_best in flax] == [[h.tokens for h in n_best] for n_best in torch]
    tokenizer, ids = translator.tokenizers.src, translator.source_ids(TEXTS)
    assert ids[0] == tokenizer.encode_sources(["<term> C </term> <term> D </term>"])[0]
    for i in (0, 2, 3):
        expected = generate(translator.flax, np.array([ids[i]]), decoding)
        assert [list(h.tokens) for h in flax[i]] == expected.sentences()[0]
    plain = twinax.load(model)
    assert plain.hypotheses(TEXTS[2:3], decoding) == flax[2:3]
    assert plain.source_ids(TEXTS)[5] == ids[5]
    assert translator.too_long(TEXTS) == []
    targets = ["A D", "D E", "H F A"]
    sources = [TEXTS[i] for i in (0, 2, 3)]
    scores = [translator.score(sources, targets, framework) for framework in ("flax", "torch")]
    np.testing.assert_allclose(*scores, rtol=1e-5)
    assert np.isclose(scores[0], plain.score(sources, targets), rtol=1e-6).tolist() == [False, True, False]
    assert translator.attention("a b", "A B").sources == ["<term>", "C", "</term>", "b", "</s>"]
    assert re.search(r"glossary +3 terms", repr(translator))


def test_a_glossary_stays_with_other_settings(translator):
    ids = translator.source_ids(TEXTS)
    assert translator.with_forced_bos("A").source_ids(TEXTS) == ids
    other = translator.with_glossary({"d": "D"})
    assert [len(row) for row in other.source_ids(["a", "d"])] == [2, 4]


def test_every_model_of_an_ensemble_reads_the_terms(translator, model):
    plain = twinax.load(model)
    ensemble = Ensemble([plain, plain]).with_glossary(TERMS)
    assert ensemble.translate(TEXTS, **SEARCH) == translator.translate(TEXTS, **SEARCH)
    assert ensemble._sources_of(TEXTS[:1], np.array(translator.source_ids(TEXTS[:1])))[1][0, 0] == 4
    with pytest.raises(DataError, match="v1: the glossary: the source tokenizer has no token '<term>'"):
        twinax.load(PLAIN).with_glossary(TERMS)


def test_the_server_reads_the_terms(files, model, translator, monkeypatch):
    engines = []

    def of(name, engine, *settings):
        engines.append(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(Service, "of", of)
    with pytest.raises(KeyboardInterrupt):
        serve(Serve(checkpoint=str(model), glossary="terms.tsv", port=0, max_length=8))
    task = Task("translate", *engines[0].directions.pair(None, None), 3)
    answers = dict(engines[0].compute(task, [(text, 0) for text in TEXTS]))
    expected = translator.hypotheses(TEXTS, DecodingConfig(**SEARCH, n_best=3))
    assert {i: answer.hypotheses for i, answer in answers.items()} == {i: h for i, h in enumerate(expected) if h}


def test_a_source_that_fits_with_its_target_terms_is_not_truncated(model, translator):
    """Its term has more tokens than the target term and its tags."""
    term, texts = "a b c d e f g h a b", ["a b c d e f g h a b c d e f g h a b"]
    assert twinax.load(model).too_long(texts) == [0]
    other = translator.with_glossary({term: "C"})
    assert other.too_long(texts) == []
    assert other.source_ids(texts) == other.tokenizers.src.encode_sources(["<term> C </term> c d e f g h a b"])


def test_the_command_counts_terms(command, files, model, translator):
    """Each line's own; a target term counts as often as the source has its term."""
    words = ("translate", model, "src", "--glossary", "terms.tsv", *FLAGS)
    status, out, err = command(*words)
    assert (status, out.splitlines()) == (0, translator.translate(TEXTS, **SEARCH))
    translated = 0
    for source, line in zip(TEXTS, out.splitlines(), strict=True):
        for sides in TERMS.items():
            texts = (f" {text} ".replace(" ", "  ") for text in (source, line))
            terms = (f" {term} ".replace(" ", "  ")[1:-1] for term in sides)
            translated += min(text.count(term) for text, term in zip(texts, terms, strict=True))
    expected = f"{NUMBER} terms in the sources, {translated} of them translated by their target term"
    assert err == f"twinax: terms.tsv: {expected}\n"
    assert command(*words, "--framework", "torch")[1] == out
    assert expected in command(*words, "--n-best", "2")[2]
    Path("few").write_text("d e\n")
    assert command("translate", model, "few", *words[3:])[2] == ""
    assert expected not in command("translate", model, "src")[2]


def test_prefixes_and_outputs_go_with_a_glossary(command, files, model, monkeypatch):
    monkeypatch.setattr("twinax.cli.text.text_commands._FIRST_WINDOW", 2)
    Path("prefix").write_text("D\n\n\nA A\n\n\n")
    words = ("translate", model, "src", *FLAGS, "--prefix", "prefix", "--glossary")
    out = command(*words, "terms.tsv")[1]
    assert [out.splitlines()[i].startswith(prefix) for i, prefix in ((0, "D"), (3, "A A"))] == [True, True]

    error = DataError("the third line")  # which keeps the command's variables, and what they have not closed

    def fail(*arguments):
        raise error

    with monkeypatch.context() as context:
        context.setattr("twinax.cli.text.text_commands.warn_about_text", lambda t, s, first: first > 2 and fail())
        assert command(*words, "terms.tsv", "--output", "out")[0] == 2
    Path("other.tsv").write_text("a\tB\n")
    status, _, err = command(*words, "other.tsv", "--output", "out")
    assert (status, "was begun with other settings (glossary)" in err) == (2, True)
    assert command(*words, "terms.tsv", "--output", "out")[0] == 0
    assert Path("out").read_text() == out


def test_an_evaluation_has_a_glossary(command, files, model):
    Path("tgt").write_text("".join(f"{text.upper()}\n" for text in TEXTS))
    words = ("evaluate", "--src", "src", "--tgt", "tgt", "--glossary", "terms.tsv", *FLAGS)
    status, _, err = command(*words, model, "--json", "scores.json")
    assert status == 0, err
    assert f"twinax: terms.tsv: {NUMBER} terms in the sources" in err
    assert json.loads(Path("scores.json").read_text())["glossary"] == "terms.tsv"
    status, _, err = command("evaluate", "tgt", *words[1:7])
    assert (status, "--glossary: every system is a text file, nothing is translated" in err) == (2, True)


WRONG = {
    "no tags": (PLAIN, "terms.tsv", f"{PLAIN}: terms.tsv: the source tokenizer has no token '<term>'; the model has"),
    "no file": (None, "nowhere", "nowhere"),
    "a line": (None, "src", "src, line 1: must have a source term, a tab and a target term, not 0 tabs"),
}


@pytest.mark.parametrize(("checkpoint", "glossary", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_line(checkpoint, glossary, message, command, files, model):
    for name, *flags in (("translate", "src"), ("evaluate", "--src", "src", "--tgt", "src")):
        status, out, err = command(name, checkpoint or model, *flags, "--glossary", glossary)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"twinax: {message}")
