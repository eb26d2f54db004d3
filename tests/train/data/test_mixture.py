"""Mixtures of corpora: counts per corpus against plain arithmetic, tags, languages, and exact resume."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.support.mixtures import SIZES, assert_same_batches, member, run_of, write_corpora
from twinax.backend.errors import ConfigError, DataError
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.mixture import Mixture, MixtureCorpus
from twinax.configs.run import LoopConfig
from twinax.train.data.prepare import prepare
from twinax.train.loop.loop import train
from twinax.train.tracking.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_programs")
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def sentences_of(data, epochs):
    """How often each source occurs in each epoch, by its first word."""
    counts = [Counter() for _ in range(epochs)]
    batches = data.batches()
    index = 0
    while (batch := batches[index]).epoch < epochs:
        rows = [row[row != 0][:-1] for row in batch.arrays.src_tokens if row.any()]
        counts[batch.epoch].update(text.split()[0] for text in data.tokenizers.src.decode(rows))
        index += 1
    return counts


@pytest.mark.parametrize("workers", [0, 2])
def test_counts_of_each_corpus_over_two_epochs(workers, folder, tmp_path):
    copies = {"genuine": 2, "back": 0.5, "domain": 1.25}
    mixture = Mixture(corpora=tuple(member(folder, name, copies=n) for name, n in copies.items()))
    lines = []
    data = prepare(run_of(tmp_path, mixture), say=lines.append)
    epochs = sentences_of(data, 2)
    for name, size in SIZES.items():
        for counts in epochs:
            own = {word: n for word, n in counts.items() if word.startswith(name)}
            assert sum(own.values()) == round(copies[name] * size)
            assert {int(copies[name])} <= {*own.values()} | {0} <= {0, *range(int(copies[name]), int(copies[name]) + 2)}
    both = epochs[0] + epochs[1]
    assert {both[f"genuine{i}"] for i in range(60)} == {4}
    assert {both[f"back{i}"] for i in range(90)} == {1}  # half of them in each epoch
    assert Counter(both[f"domain{i}"] for i in range(20)) == {2: 10, 3: 10}  # a quarter more, others each time
    assert epochs[0] != epochs[1]
    assert "back: 90 pairs, 0.5 times per epoch" in lines
    start = len(data.batches().plan(0).batches) - 2
    for a, b in zip(
        data.batches().read(start, workers), (data.batches()[i] for i in range(start, start + 5)), strict=False
    ):
        assert a[:3] == b[:3]
        assert all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_shapes_hold_pairs_that_later_epochs_have(dropout, tmp_path):
    """The longest pair is not in the first epoch."""
    for name in ("src", "tgt", "valid.src", "valid.tgt"):
        lines = ["a b"] * 40
        lines[7] = "a " * 20
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = {name.replace(".", "_"): str(tmp_path / name) for name in ("src", "tgt", "valid.src", "valid.tgt")}
    mixture = Mixture(corpora=(MixtureCorpus(name="x", corpus=CorpusConfig(**files), copies=0.25),))
    data = prepare(run_of(tmp_path, mixture, tokenizer=TokenizerConfig(vocab_size=50, bpe_dropout=dropout)))
    batches = data.batches()
    longest = []
    for i in range(40):
        batch = batches[i]
        if batch.epoch < 4:
            longest += [batch.epoch] * int((batch.arrays.src_tokens != data.run.model.pad_id).sum(1).max() > 20)
    assert len(longest) == 1
    assert longest[0] > 0


def test_an_epoch_without_pairs_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"^copies: some epochs have no pair"):
        prepare(run_of(tmp_path, Mixture(corpora=(member(folder, "genuine", copies=0.01),))))


def test_a_mixture_of_one_corpus_is_that_corpus(folder, tmp_path):
    mixed = prepare(run_of(tmp_path, Mixture(corpora=(member(folder, "genuine"),))))
    alone = prepare(run_of(tmp_path, corpus=member(folder, "genuine").corpus))
    assert mixed.fingerprint() == alone.fingerprint()
    assert replace(mixed.run, corpus=alone.run.corpus) == alone.run
    assert_same_batches(mixed, alone)


@given(
    temperature=st.floats(1, 50),
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=5),
)
def test_shares_by_temperature(temperature, sizes):
    names = [f"c{i}" for i in range(len(sizes))]
    corpora = tuple(MixtureCorpus(name=name, corpus=CorpusConfig(src="a", tgt="b")) for name in names)
    copies = Mixture(corpora=corpora, temperature=temperature).copies(dict(zip(names, sizes, strict=True)))
    shares = np.array([copies[name] * size for name, size in zip(names, sizes, strict=True)])
    expected = np.array(sizes, float) ** (1 / temperature)
    np.testing.assert_allclose(shares / shares.sum(), expected / expected.sum(), rtol=1e-9)
    assert min(copies.values()) == pytest.approx(1)


def test_a_tag_is_one_token_before_the_text(folder, tmp_path):
    corpora = member(folder, "genuine"), member(folder, "back", tag="<bt>", copies=0.5)
    data = prepare(run_of(tmp_path, Mixture(corpora=corpora)))
    tokenizer = data.tokenizers.src
    assert data.run.tokenizer.tags == ("<bt>",)
    tag = tokenizer.id_of("<bt>")
    assert (tag, data.run.model.src_vocab_size) == (4, tokenizer.vocab_size)
    for part, expected in zip(data.valid, (False, True), strict=True):
        ids = part.pairs.sources(range(5))
        assert [sentence[0] == tag for sentence in ids] == [expected] * 5
        assert all(np.count_nonzero(sentence == tag) == expected for sentence in ids)
        texts = tokenizer.decode([sentence[:-1] for sentence in ids])  # without the tag and the unknown first word
        assert texts == [reference.partition(" ")[2] for reference in part.references]
    assert tokenizer.encode(["<bt> a"]) == [[tag, *tokenizer.encode(["a"])[0]]]  # how one translates with it
    plain = TokenizerConfig(kind="word")
    first = prepare(run_of(tmp_path, corpus=member(folder, "genuine").corpus, tokenizer=plain))
    first.tokenizers.save(tmp_path)
    loading = TokenizerConfig(load=(str(tmp_path / "tokenizer"),))
    with pytest.raises(DataError, match=r"^tag='<bt>': the tokenizer of sources has no such token; train one, or omit"):
        prepare(run_of(tmp_path, Mixture(corpora=corpora), tokenizer=loading))


def test_training_validates_each_corpus_and_resumes_exactly(folder, tmp_path):
    """From the store of its texts, in the middle of an epoch with another number of batches than the first."""
    corpora = member(folder, "genuine", copies=0.7), member(folder, "domain", copies=1.4)
    run = run_of(tmp_path, Mixture(corpora=corpora), loop=LoopConfig(updates=24, validate_every=12, translations=2))
    train(run, tmp_path / "whole", QUIET)
    prepare(run, store=tmp_path / "store")
    stored = replace(run, corpus=CorpusConfig(store=str(tmp_path / "store")), tokenizer=TokenizerConfig())
    train(replace(run, loop=replace(run.loop, updates=17)), tmp_path / "parts", QUIET)
    train(stored, tmp_path / "parts", QUIET)
    whole, parts = (
        {r["update"]: r for r in read_metrics(tmp_path / name) if "checksum" in r} for name in ("whole", "parts")
    )
    assert whole.keys() == {*range(1, 25)}
    for update, record in whole.items():
        assert {k: record[k] for k in ("loss", "checksum", "epoch", "batch")} == {
            k: parts[update][k] for k in ("loss", "checksum", "epoch", "batch")
        }
    validations = [
        [r["validation"] for r in read_metrics(tmp_path / n) if "validation" in r] for n in ("whole", "parts")
    ]
    assert validations[0] == [record for record in validations[1] if record in validations[0]]
    record, *_ = validations[0]
    data = prepare(run)
    tokens = [sum(len(ids) - 1 for ids in part.pairs.targets(range(5))) for part in data.valid]
    weighted = sum(record[f"{part.name}/loss"] * n for part, n in zip(data.valid, tokens, strict=True)) / sum(tokens)
    assert record["loss"] == pytest.approx(weighted, rel=1e-6)
    assert record["genuine/loss"] != pytest.approx(record["domain/loss"], rel=1e-3)
    assert {"genuine/bleu", "domain/bleu", "bleu"} <= record.keys()
    alone = run_of(tmp_path, corpus=member(folder, "domain").corpus, tokenizer=data.run.tokenizer)
    assert prepare(alone, data.tokenizers).valid[0].pairs.fingerprint() == data.valid[1].pairs.fingerprint()


def test_a_file_of_a_mixture(folder, tmp_path):
    text = """
temperature = 3
[[corpora]]
name = "news"
src = "genuine.src"
tgt = "genuine.tgt"
tag = "<n>"

[[corpora]]
dataset = "some/name"
src_column = "de"
tgt_column = "en"
"""
    path = folder / "mixture.toml"
    path.write_text(text)
    mixture = Mixture.read(str(path))
    assert [corpus.name for corpus in mixture.corpora] == ["news", "some_name"]
    mixture.write(str(tmp_path / "again.json"))
    assert Mixture.read(str(tmp_path / "again.json")).corpora[0].corpus.src == str(folder / "genuine.src")
    assert json.loads((tmp_path / "again.json").read_text())["temperature"] == 3


WRONG = {
    "": "corpora must be tables",
    "corpora = 1": "corpora must be tables",
    "corpora = []": "there must be one, and their names must differ: none",
    "a = 1": "has a; a mixture has temperature and corpora",
    "[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'\nwhat = 1": "unknown fields what; a corpus has copies, dataset",
    "[[corpora]]\nname = 'x'\nsrc = 'a'": "src=.*: needs tgt too",
    "[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'\ncopies = 0": "copies=0.0: must be a number above 0",
    "[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'\ncopies = -1": "copies=-1.0: must be a number above 0",
    "[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'\ncopies = inf": "copies=inf: must be a number above 0",
    "[[corpora]]\nname = \"x\\ny\"\nsrc = 'a'\ntgt = 'b'": "must not be empty, and have neither a slash nor a",
    "[[corpora]]\nname = 'x'\nstore = 's'": "store='s': a corpus of a mixture must be text or",
    "temperature = 2\n[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'\ncopies = 2": "omit those of x",
    "temperature = 0.5\n[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'": "temperature=0.5: must be at least 1",
    "[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'\n[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'": "must differ: x, x",
    "temperature = 'warm'\n[[corpora]]\nname = 'x'\nsrc = 'a'\ntgt = 'b'": "temperature='warm': must be a number",
    "[": "cannot be read: ",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_wrong_files_are_one_line(text, message, tmp_path):
    path = tmp_path / "mixture.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: .*{message}") as error:
        Mixture.read(str(path))
    assert "\n" not in str(error.value)


def test_settings_that_contradict_a_mixture(tmp_path):
    with pytest.raises(ConfigError, match=r"src='a': mixture='m.toml' has all pairs; omit one of them"):
        CorpusConfig(mixture="m.toml", src="a", tgt="b")
    with pytest.raises(ConfigError, match=r"nowhere.toml: cannot be read: No such file or directory"):
        Mixture.read(str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match="a corpus of a mixture must be text or a dataset"):
        Mixture(corpora=(MixtureCorpus(name="x", corpus=CorpusConfig(store="s")),)).write(str(tmp_path / "m.json"))
