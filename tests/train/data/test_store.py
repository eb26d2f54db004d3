"""Stores of encoded pairs: their content against `transformers`, interruptions, damage, several processes."""

import shutil
import threading
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.support.stores import ids_of, store_of
from twinax.backend.cache_directory import cache_directory
from twinax.backend.errors import ConfigError, DataError
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.run import RunConfig
from twinax.train.data import parts, store_writing
from twinax.train.data.corpus_store import CorpusStore
from twinax.train.data.encoding import Sides
from twinax.train.data.prepare import prepare
from twinax.train.data.store import INDEX, StoredPairs
from twinax.train.data.store_writing import Request, stored_pairs
from twinax.train.text.tokenization import train_tokenizer

WORDS = ["ein", "Mann", "läuft", "über", "den", "Platz", "日本", "a", "dog"]
TOKENIZER = train_tokenizer(TokenizerConfig(vocab_size=60), [" ".join(WORDS)] * 3)
SIDES = Sides(TOKENIZER, TOKENIZER, [1], (12, 12))
SENTENCES = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
PAIRS = [("" if i == 3 else " ".join(WORDS[i % 7 :][:3]), " ".join(WORDS[: 1 + i % 5])) for i in range(50)]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(store_writing, "_PAIRS", 8)


@pytest.fixture(scope="module")
def reference_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("shard", [1, 3, 1000])
@given(pairs=st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=9).map([("a", "a")].__add__))
@settings(max_examples=15)
def test_ids_are_those_of_transformers_however_many_shards_there_are(shard, pairs, reference_tokenizer):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(store_writing, "_PAIRS", shard)
        stored = store_of(pairs, SIDES, texts=True)
    encoded = [[reference_tokenizer(text)["input_ids"] for text in pair] for pair in pairs]
    kept = [i for i, (a, b) in enumerate(encoded) if len(a) > 1 and len(b) > 1 and len(a) <= 12 and len(b) <= 12]
    targets = [[1, *encoded[i][1]] for i in kept]
    assert ids_of(stored) == [[encoded[i][0] for i in kept], targets]
    assert ids_of(stored, range(len(kept))[::-2]) == [[encoded[i][0] for i in kept[::-2]], targets[::-2]]
    assert stored.lengths.tolist() == [[len(encoded[i][0]), len(b) - 1] for i, b in zip(kept, targets, strict=True)]
    assert stored.texts(len(pairs)) == [pairs[i] for i in kept]
    assert stored.fingerprint() == store_of(pairs, SIDES).fingerprint()


def request(pairs=PAIRS, **key):
    return Request("x", pairs, len(PAIRS), SIDES, key)


class Interrupted(Exception):
    pass


def interrupted(after):
    for i, pair in enumerate(PAIRS):
        if i == after:
            raise Interrupted
        yield pair


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("after", [0, 7, 8, 20, 49])
def test_an_interrupted_preparation_goes_on(after, tmp_path, monkeypatch):
    with pytest.raises(Interrupted):
        stored_pairs(tmp_path, request(interrupted(after)), print)
    assert not (tmp_path / INDEX).exists()
    with pytest.raises(DataError, match=f"{tmp_path}: has no index.json"):
        StoredPairs(tmp_path)
    (tmp_path / ".00001.arrow.twinax-x.arrow").write_bytes(b"half")  # a killed process leaves its temporary file
    expected = ids_of(store_of(PAIRS, SIDES))
    lines, encoded = [], []
    encode = store_writing.encode_pairs

    def recorded(pairs, *rest):
        pairs = list(pairs)
        encoded.extend(pairs)
        return encode(pairs, *rest)

    monkeypatch.setattr(store_writing, "encode_pairs", recorded)
    stored = stored_pairs(tmp_path, request(), lines.append)
    assert encoded == PAIRS[after // 8 * 8 :]
    assert lines == ([f"x: {after // 8 * 8} of 50 pairs were encoded before"] if after >= 8 else [])
    assert ids_of(stored) == expected
    stored_pairs(tmp_path, request(), lines.append)
    assert len(encoded) == 50 - after // 8 * 8  # nothing is encoded again


@pytest.mark.usefixtures("small_shards")
def test_a_shard_that_is_cut_off_is_encoded_again(tmp_path):
    with pytest.raises(Interrupted):
        stored_pairs(tmp_path, request(interrupted(30)), print)
    path = tmp_path / "00001.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    assert ids_of(stored_pairs(tmp_path, request(), print)) == ids_of(store_of(PAIRS, SIDES))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "store"
    with pytest.MonkeyPatch.context() as context:
        context.setattr(store_writing, "_PAIRS", 25)
        return stored_pairs(folder, request(), print)


@pytest.mark.parametrize("name", ["00000.arrow", "00001.arrow", INDEX])
@given(data=st.data())
@settings(max_examples=60)
def test_no_damaged_byte_gives_other_ids(name, data, whole, tmp_path_factory):
    """One flipped bit, or a file that is cut off or longer."""
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(whole.folder, folder)
    content = bytearray((folder / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = content[:place] + b"\0" * data.draw(st.integers(0, 1)) * (len(content) - place + 1)
    (folder / name).write_bytes(content)
    line = ""
    try:
        damaged = StoredPairs(folder)
        assert ids_of(damaged) == ids_of(whole)
        assert damaged.lengths.tolist() == whole.lengths.tolist()
    except DataError as error:
        line = str(error)
    finally:
        shutil.rmtree(folder)
    assert line == "" or (line.startswith(str(folder)) and "\n" not in line)


DAMAGED_SIZES = """
import sys
from contextlib import suppress
from pathlib import Path
from twinax.backend.errors import DataError
from twinax.train.data.store import Shard

path, end = Path(sys.argv[1]), int(sys.argv[2])
content = path.read_bytes()
for place in range(end):
    damaged = bytearray(content)
    damaged[place] ^= 1 << 7
    path.write_bytes(damaged)
    with suppress(DataError):
        assert Shard.open(path).info.counts.kept == 24
"""


def test_no_damaged_size_makes_arrow_read_beyond_the_file(whole, tmp_path, forks):
    """They lie before the first sentence; without a check, some flipped bits end the process."""
    content = (whole.folder / "00000.arrow").read_bytes()
    (tmp_path / "shard").write_bytes(content)
    first_ids = content.index(whole.sources([0])[0].astype(np.uint16).tobytes())
    result = forks(DAMAGED_SIZES, tmp_path / "shard", first_ids)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_worker_opens_the_store_itself(whole):
    import pickle

    content = pickle.dumps(whole)
    assert len(content) < 500
    assert ids_of(pickle.loads(content)) == ids_of(whole)


def test_a_second_process_waits_and_encodes_nothing(tmp_path):
    lines, results, started, go_on = [], [], threading.Event(), threading.Event()

    def slow_pairs():
        started.set()
        assert go_on.wait(30)
        yield from PAIRS

    def say(line):
        lines.append(line)
        go_on.set()

    first = threading.Thread(target=lambda: results.append(stored_pairs(tmp_path, request(slow_pairs()), print)))
    first.start()
    assert started.wait(30)
    second = stored_pairs(tmp_path, request(interrupted(0)), say)
    first.join()
    assert len(lines) == 1
    assert lines[0].startswith("waiting for another process that encodes the same corpus (process ")
    assert ids_of(second) == ids_of(results[0])


@pytest.mark.usefixtures("small_shards")
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch):
    write = store_writing.write_shard

    def full(path, encoded, first, *rest):
        if first >= 16:
            raise OSError(28, "No space left on device")
        return write(path, encoded, first, *rest)

    with monkeypatch.context() as context:
        context.setattr(store_writing, "write_shard", full)
        with pytest.raises(DataError, match=rf"^{tmp_path}: cannot be written: No space left on device; free space or"):
            stored_pairs(tmp_path, request(), print)
    lines = []
    stored_pairs(tmp_path, request(), lines.append)
    assert lines == ["x: 16 of 50 pairs were encoded before"]
    with monkeypatch.context() as context:
        context.setattr(pa, "OSFile", lambda *arguments: (_ for _ in ()).throw(pa.ArrowInvalid("no")))
        shutil.rmtree(tmp_path)
        with pytest.raises(pa.ArrowInvalid):
            stored_pairs(tmp_path, request(), print)
        assert not (tmp_path / INDEX).exists()


@pytest.mark.usefixtures("small_shards")
def test_a_store_without_pairs_does_not_refuse_the_corrected_text(tmp_path):
    """Its files are removed, those of others are not."""
    wrong = [("a", "")] * 50
    for folder, files in ((tmp_path / "store", []), (tmp_path / "other", ["notes"])):
        with pytest.raises(Interrupted):
            stored_pairs(folder, request(chain(wrong[:20], interrupted(0)), text=1), print)
        for name in files:
            (folder / name).touch()
        with pytest.raises(DataError, match=r"^x: all 50 pairs are dropped: 50 have an empty side"):
            stored_pairs(folder, request(wrong, text=1), print)
        assert folder.is_dir() == bool(files)
        assert [path.name for path in folder.glob("*")] == files
    assert ids_of(stored_pairs(tmp_path / "store", request(text=2), print)) == ids_of(store_of(PAIRS, SIDES))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(DataError, match=rf"^{tmp_path}: is not empty \(notes\); choose another folder"):
        stored_pairs(tmp_path, request(), print)
    store = tmp_path / "store"
    stored_pairs(store, request(longest=[12, 12]), print)
    with pytest.raises(DataError, match=rf"^{store}: is the store of another corpus or other settings \(longest"):
        stored_pairs(store, request(longest=[13, 12]), print)
    index = store / INDEX
    index.write_text(index.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match=rf"^{store}: has format 2, not 1: another version of twinax wrote it"):
        StoredPairs(store)


@pytest.fixture
def files(tmp_path):
    for side, name in enumerate(("src", "tgt")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in PAIRS))
    return {name: str(tmp_path / name) for name in ("src", "tgt")}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "twinax"


def run_of(files, **tokenizer):
    settings = {"vocab_size": 60, **tokenizer}
    return RunConfig(corpus=CorpusConfig(**files, held_out=5), tokenizer=TokenizerConfig(**settings))


@pytest.mark.usefixtures("cache")
def test_a_second_start_reads_encodes_and_trains_nothing(files, monkeypatch):
    first = prepare(run_of(files))
    with monkeypatch.context() as context:
        for place, name in ((store_writing, "encode_pairs"), (parts, "xxhash")):
            context.setattr(place, name, None)
        context.setattr("twinax.train.data.tokenizer_pair.train_tokenizers", None)
        second = prepare(run_of(files))
        # the tokenizer of a run directory gives the same key
        again = prepare(run_of(files), tokenizers=second.tokenizers)
    for data in (second, again):
        assert ids_of(data.train) == ids_of(first.train)
        assert (data.valid[0].references, data.counts, data.buckets) == (
            first.valid[0].references,
            first.counts,
            first.buckets,
        )
    words = prepare(run_of(files, kind="word")).tokenizers  # other settings, another tokenizer
    assert words.src.vocabulary() != first.tokenizers.src.vocabulary()
    path = Path(files["src"])
    path.write_text(path.read_text().replace("Mann", "dog"))  # the same number of pairs
    assert ids_of(prepare(run_of(files)).train) != ids_of(first.train)


@pytest.mark.usefixtures("cache")
def test_a_file_that_changes_while_it_is_read_is_refused(files, monkeypatch):
    read = parts.read_pairs

    def changing(corpus):
        yield from read(corpus)
        Path(corpus.src).touch()

    monkeypatch.setattr(parts, "read_pairs", changing)
    with pytest.raises(DataError, match=f"{files['src']}, {files['tgt']}: the files changed while they were read"):
        prepare(run_of(files), tokenizers=None)


@pytest.mark.usefixtures("cache")
def test_the_tokenizer_of_a_large_corpus_is_trained_on_a_sample(tmp_path):
    """Evenly spaced pairs, which the message states; the held-out ones are not among them."""
    for name in ("src", "tgt"):
        (tmp_path / name).write_text("".join(f"{name}{i}\n" for i in range(200)))
    run = RunConfig(
        corpus=CorpusConfig(src=str(tmp_path / "src"), tgt=str(tmp_path / "tgt"), held_out=50),
        tokenizer=TokenizerConfig(kind="word", sample=30),
    )
    lines = []
    vocabulary = prepare(run, say=lines.append).tokenizers.src.vocabulary()
    sampled = sorted(int(token[3:]) for token in vocabulary if token.startswith("src"))
    held_out = {*np.random.default_rng([0, 200]).permutation(200)[:50].tolist()}
    kept = [i for i in range(200) if i not in held_out]
    assert sampled == kept[4::5]
    assert len(vocabulary) == 2 * 30 + 4
    assert "training the tokenizer on 30 of 150 pairs: word, at most 1,000 tokens" in lines


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.usefixtures("cache")
def test_a_store_takes_the_place_of_the_text(dropout, files, tmp_path):
    """The same batches, without the text, the tokenizer's files or the cache."""
    folder = tmp_path / "store"
    from_text = prepare(run_of(files, bpe_dropout=dropout), store=folder)
    for name in ("src", "tgt"):
        Path(files[name]).unlink()
    shutil.rmtree(tmp_path / "cache")
    shutil.move(folder, tmp_path / "moved")
    corpus = CorpusConfig(store=str(tmp_path / "moved"))
    from_store = prepare(RunConfig(corpus=corpus, tokenizer=TokenizerConfig(bpe_dropout=dropout)))
    assert replace(from_store.run, corpus=from_text.run.corpus) == from_text.run
    assert from_store.valid[0].references == from_text.valid[0].references
    for a, b in islice(zip(from_store.batches().read(0), from_text.batches().read(0), strict=True), 40):
        assert a[:3] == b[:3]
        assert all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("cache")
def test_a_store_that_does_not_fit_the_run_is_refused(files, tmp_path):
    folder = tmp_path / "store"
    prepare(run_of(files), store=folder)
    run = RunConfig(corpus=CorpusConfig(store=str(folder)))
    with pytest.raises(ConfigError, match=r"tokenizer.vocab_size=50 and not 60: the store's pairs are encoded"):
        prepare(replace(run, tokenizer=TokenizerConfig(vocab_size=50)))
    with pytest.raises(ConfigError, match="both_directions=True: the store has one direction"):
        prepare(replace(run, both_directions=True))
    with pytest.raises(DataError, match=r"bpe_dropout=0.1: .* was prepared without it; prepare it again, or omit it"):
        prepare(replace(run, tokenizer=TokenizerConfig(bpe_dropout=0.1)))
    with pytest.raises(DataError, match=f"^{folder}: has a source of 4 tokens, and the limit of this run is 3"):
        prepare(replace(run, batches=replace(run.batches, max_src_length=3)))
    with pytest.raises(DataError, match=rf"^{folder}: its targets begin with the ids \[1\], the model's with \[2\]"):
        prepare(replace(run, model=run.model.replace(decoder_start_id=2)))
    other = train_tokenizer(TokenizerConfig(vocab_size=60), ["another text"] * 3)
    with pytest.raises(DataError, match=f"^{folder}: its tokenizer is not the run's"):
        prepare(run, tokenizers=type(CorpusStore.read(folder).tokenizers)(other, other))
    with pytest.raises(ConfigError, match=r"src='a': store='.*' has all pairs; omit one of them"):
        CorpusConfig(store=str(folder), src="a", tgt="b")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer"):
        CorpusStore.read(folder)
    (folder / "store.json").unlink()
    with pytest.raises(DataError, match=f"^{folder}: is not complete; start `twinax data --store` again"):
        CorpusStore.read(folder)
    with pytest.raises(DataError, match=f"^{tmp_path}: is no store"):
        CorpusStore.read(tmp_path)
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        CorpusStore.read(tmp_path / "nowhere")


def test_commands_write_use_list_and_clear(command, files, cache):
    flags = ("--held-out", "5", "--tokenizer.vocab-size", "60")
    texts = ("--src", files["src"], "--tgt", files["tgt"])
    status, _, errors = command("data", *texts, *flags)
    assert status == 0, errors
    status, table, _ = command("data", "--cache")
    assert status == 0
    assert str(cache / "corpora") in table.replace("\n", "").replace(" ", "") or "corpora" in table
    assert {len(list(cache_directory(name).iterdir())) for name in ("corpora", "contents", "tokenizers")} == {1, 2}
    assert command("data", "--clear-cache")[0] == 0
    assert not list(cache_directory("corpora").iterdir())
    folder = cache.parent.parent / "own"
    status, output, errors = command("data", *texts, *flags, "--store", folder)
    assert status == 0, errors
    assert f"encoded pairs: {folder}" in output.replace("\n", "")
    assert not list(cache_directory("corpora").iterdir())
    status, _, errors = command("data", "--corpus.store", folder)
    assert status == 0, errors
    status, _, errors = command("data", "--corpus.store", folder, "--store", folder)
    assert (status, errors.count("\n")) == (2, 1)
