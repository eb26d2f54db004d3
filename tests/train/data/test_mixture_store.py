"""Stores of mixtures: the same run without the texts, interruptions, damage, several processes."""

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mixtures import assert_same_batches, member, run_of, write_corpora
from twinax.backend.errors import ConfigError, DataError
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.mixture import Mixture
from twinax.configs.run import RunConfig
from twinax.train.data import store_writing
from twinax.train.data.corpus_store import CorpusStore
from twinax.train.data.prepare import prepare

STORE_V1 = Path(__file__).parent / "store-v1"
FINGERPRINT_V1 = "033d194ca8d8ea7e 8cdb9f638e043832"  # as version 1 printed it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def mixture_of(folder, **copies):
    tags = {"back": "<bt>"}
    corpora = (member(folder, name, copies=number, tag=tags.get(name)) for name, number in copies.items())
    return Mixture(corpora=tuple(corpora))


def of_store(run, folder):
    return replace(run, corpus=CorpusConfig(store=str(folder)), tokenizer=TokenizerConfig())


def same_run(a, b):
    assert (a.fingerprint(), a.counts, a.buckets) == (b.fingerprint(), b.counts, b.buckets)
    assert replace(a.run, corpus=b.run.corpus) == b.run
    for x, y in zip(a.valid, b.valid, strict=True):
        assert (x.name, x.references, x.model) == (y.name, y.references, y.model)
    assert_same_batches(a, b)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_store_takes_the_place_of_the_texts(dropout, tmp_path, cache):
    """The same run, without the texts, the mixture's file or the cache; nothing is written into the store."""
    texts = tmp_path / "texts"
    texts.mkdir()
    tokenizer = TokenizerConfig(vocab_size=60, bpe_dropout=dropout)
    mixture = replace(mixture_of(write_corpora(texts), genuine=None, back=None, domain=None), temperature=2)
    from_texts = prepare(run_of(texts, mixture, tokenizer=tokenizer), store=tmp_path / "new")
    store = shutil.move(tmp_path / "new", tmp_path / "store")
    shutil.rmtree(texts)
    shutil.rmtree(cache)
    lines = []
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    run = replace(from_texts.run, corpus=CorpusConfig(store=str(store)), tokenizer=TokenizerConfig(bpe_dropout=dropout))
    from_store = prepare(run, say=lines.append)
    same_run(from_store, from_texts)
    assert "back: 90 pairs, 1 times per epoch, with <bt>" in lines
    assert [part.name for part in from_store.valid] == ["genuine", "back", "domain"]
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert not cache.exists()


def test_the_flags_of_the_preparation_are_accepted(folder, tmp_path):
    """Which leave the vocabulary's size and the tags open; others are refused."""
    mixture = mixture_of(folder, genuine=1, back=2)
    run = run_of(tmp_path, mixture, tokenizer=TokenizerConfig(kind="word", lowercase=True))
    first = prepare(run, store=tmp_path / "store")
    assert (first.run.tokenizer.vocab_size, first.run.tokenizer.tags) == (1000, ("<bt>",))
    corpus = CorpusConfig(store=str(tmp_path / "store"))
    same_run(prepare(replace(run, corpus=corpus)), first)
    for changes, name in (
        ({"tags": ("<x>",)}, "tags"),
        ({"vocab_size": 90}, "vocab_size"),
        ({"lowercase": False}, "l"),
    ):
        with pytest.raises(ConfigError, match=f"^tokenizer.{name}[^;]*: the store's pairs are encoded with its own"):
            prepare(replace(run, corpus=corpus, tokenizer=replace(run.tokenizer, **changes)))


def test_a_mixture_of_one_corpus_has_the_store_of_that_corpus(folder, tmp_path):
    prepare(run_of(tmp_path, mixture_of(folder, genuine=None)), store=tmp_path / "mixed")
    prepare(run_of(tmp_path, corpus=member(folder, "genuine").corpus), store=tmp_path / "alone")
    files = [
        {path.relative_to(store): path.read_bytes() for path in store.rglob("*.*")}
        for store in (tmp_path / "mixed", tmp_path / "alone")
    ]
    description = Path("store.json")
    mixed, alone = (json.loads(own.pop(description)) for own in files)
    assert files[0] == files[1]
    assert [mixed["corpora"][0].pop("name"), alone["corpora"][0].pop("name")] == ["genuine", "corpus"]
    assert {**mixed, "checksum": 0} == {**alone, "checksum": 0}


def test_a_store_of_version_1_is_read(tmp_path):
    run = RunConfig(corpus=CorpusConfig(store=str(STORE_V1)))
    prepared = prepare(run)
    assert prepared.fingerprint() == FINGERPRINT_V1
    assert len(prepared.valid[0].references) == 5
    store = shutil.copytree(STORE_V1, tmp_path / "store")
    path = store / "store.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(DataError, match=f"^{store}: has format 3, not 1 or 2: another version of twinax wrote it"):
        CorpusStore.read(store)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from twinax.configs.run import RunConfig
from twinax.train.data import corpus_store, store_writing
from twinax.train.data.prepare import prepare

run, store, kill_before = RunConfig.from_dict(json.loads(Path(sys.argv[1]).read_text())), *sys.argv[2:]
store_writing._PAIRS, events = 8, 0

def counted(function):
    def call(*arguments, **settings):
        global events
        events += 1
        if events == int(kill_before):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **settings)
    return call

for place, name in ((store_writing, "write_shard"), (store_writing, "index_of"), (corpus_store, "replace_file")):
    setattr(place, name, counted(getattr(place, name)))
data = prepare(run, say=lambda line: None, store=Path(store))
print(events, data.fingerprint())
"""


def test_a_killed_preparation_goes_on(folder, tmp_path, forks):
    """SIGKILL in a corpus, between two corpora, and before the description, the last of 27 files.

    The others are a shard of validation pairs per corpus, 8 and 12 shards of training pairs, and 4 indices.
    """
    run = run_of(tmp_path, mixture_of(folder, genuine=2, back=0.5))
    expected = prepare(run).fingerprint()
    (tmp_path / "run.json").write_text(run.to_json())
    store = tmp_path / "store"
    for kill_before in (8, 7, 14):
        result = forks(KILLED, tmp_path / "run.json", store, kill_before, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert (result.returncode, result.stderr) == (-9, "")
        with pytest.raises(DataError, match=f"^{store}: is not complete; start `twinax data --store` again"):
            CorpusStore.read(store)
    result = forks(KILLED, tmp_path / "run.json", store, 99, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (result.stdout, result.stderr) == (f"1 {expected}\n", "")
    same_run(prepare(of_store(run, store)), prepare(run))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as context:
        context.setenv("XDG_CACHE_HOME", str(path / "cache"))
        prepare(run_of(path, mixture_of(folder, genuine=2, back=0.5)), store=path / "store")
    return path / "store"


DAMAGES = {
    "a shard is cut off": (
        "corpus-1/train/00000.arrow",
        lambda path: os.truncate(path, 900),
        "it is incomplete; remove",
    ),
    "a shard is missing": ("corpus-0/valid/00000.arrow", Path.unlink, "it is incomplete; remove this folder"),
    "a corpus is missing": ("corpus-1", shutil.rmtree, r"train: has no index.json; .* copy the folder again"),
    "the validation is missing": ("corpus-1/valid", shutil.rmtree, r": has no index.json; .* copy the folder again"),
    "another corpus": (
        "corpus-1",
        lambda path: exchange(path),
        r": is of another store than .*; copy the folder again",
    ),
    "the tokenizer is missing": ("tokenizer", shutil.rmtree, "its tokenizer is missing or damaged; copy the folder"),
    "the tokenizer is another": (
        "tokenizer/tokenizer.json",
        lambda path: edit(path, '"genuine0"', '"genuine"'),
        "its tokenizer is missing or damaged",
    ),
    "copies are edited": ("store.json", lambda path: edit(path, '"copies": 0.5', '"copies": 0.9'), "its checksum"),
    "the description is missing": ("store.json", Path.unlink, "is not complete; start `twinax data --store` again"),
    "the description is cut off": ("store.json", lambda path: os.truncate(path, 99), "is damaged .* copy the folder"),
}


def exchange(path):
    shutil.rmtree(path)
    shutil.copytree(path.parent / "corpus-0", path)


def edit(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_store_is_one_line(name, damage, message, whole, tmp_path):
    store = shutil.copytree(whole, tmp_path / "store")
    damage(store / name)
    with pytest.raises(DataError, match=f"^{store}.*{message}") as error:
        prepare(RunConfig(corpus=CorpusConfig(store=str(store))))
    assert "\n" not in str(error.value)


def test_a_store_has_its_own_copy_of_the_mixture(folder, tmp_path, monkeypatch):
    """Until it is prepared again, which encodes nothing if only the copies differ."""
    store = tmp_path / "store"
    run = run_of(tmp_path, mixture_of(folder, genuine=2, back=0.5))
    first = prepare(run, store=store)
    changed = run_of(tmp_path, mixture_of(folder, genuine=1, back=0.25))
    same_run(prepare(of_store(run, store)), first)
    monkeypatch.setattr(store_writing, "encode_pairs", None)
    second = prepare(changed, store=store)
    assert second.fingerprint() != first.fingerprint()
    same_run(prepare(of_store(run, store)), second)
    with pytest.raises(
        DataError, match=rf"^{store}: is the store of another number of corpora \(it has corpus-0/train\)"
    ):
        prepare(run_of(tmp_path, mixture_of(folder, genuine=1)), store=store)
    with pytest.raises(DataError, match=rf"^{store}/corpus-0/valid: is the store of another corpus or other settings"):
        prepare(run_of(tmp_path, mixture_of(folder, back=0.25, genuine=1)), store=store)


def test_two_processes_that_prepare_one_store_share_the_work(folder, tmp_path):
    run, store = run_of(tmp_path, mixture_of(folder, genuine=2, back=0.5)), tmp_path / "store"
    results, encode, encoded = [], store_writing.encode_pairs, []

    def counted(pairs, *rest):
        result = encode(pairs, *rest)
        encoded.append(result.counts.read)
        return result

    with pytest.MonkeyPatch.context() as context:
        context.setattr(store_writing, "encode_pairs", counted)
        threads = [threading.Thread(target=lambda: results.append(prepare(run, store=store))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(filter(None, encoded)) == [5, 5, 60, 90]
    same_run(*results)
    same_run(prepare(of_store(run, store)), results[0])
