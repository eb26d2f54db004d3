"""BPE-dropout against the library without dropout, and against the paper's algorithm, computed exactly."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers

from tests.support.stores import ids_of, store_of
from twinax.backend.errors import DataError
from twinax.configs import ConfigError, TransformerConfig
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.train.data import bpe_dropout
from twinax.train.data.bpe_dropout import BpeDropout, Characters, Merges, segment, word_starts
from twinax.train.data.buckets import Bucket
from twinax.train.data.encoding import Sides
from twinax.train.data.prepare import prepare
from twinax.train.loop.loop import train
from twinax.train.text.tokenization import FastTokenizer, read_fast, train_tokenizer
from twinax.train.tracking.metrics import read_metrics

TEXT = (
    "ein Mann läuft über den Platz, der Hund läuft ihm nach; a man's dog isn't running — the man's running 'til 10:45 "
)
WORDS = TEXT.split()
LARGE = [Bucket(400, 400, 1)]
SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_length": 64}


def tokenizer_of(split="bytes", vocab_size=320, **settings):
    return train_tokenizer(TokenizerConfig(split=split, vocab_size=vocab_size, **settings), [TEXT] * 3 + WORDS)


def dropout_of(tokenizer, texts, rate, seed=0):
    pairs = [(text, text[::-1] + " x") for text in texts]
    encoded = store_of(pairs, Sides(tokenizer, tokenizer, [1], (400, 400)), word_starts=True)
    return BpeDropout((tokenizer, tokenizer), encoded, rate, seed), encoded


@pytest.fixture(scope="module")
def tokenizers():
    kinds = {"bytes": {}, "whitespace": {"vocab_size": 90}, "punctuation": {"vocab_size": 90, "lowercase": True}}
    return [tokenizer_of(split, **settings) for split, settings in kinds.items()]


@given(texts=st.lists(st.text(st.sampled_from("aeinrsdlM ä'.,:</>ß日\u00a0"), min_size=1).map("a".__add__), min_size=1))
@pytest.mark.parametrize("number", range(3))
def test_without_dropout_it_is_the_library_s(number, texts, tokenizers):
    """Special tokens in the text, unknown characters and spaces included."""
    tokenizer = tokenizers[number]
    dropout, encoded = dropout_of(tokenizer, [*texts, TEXT, "</s> a </s>"], 0.0)
    assert ids_of(dropout.epoch(5, LARGE)) == ids_of(encoded)


def possible(word, ranks, rate):
    """Algorithm 1 of the paper: segmentation -> its probability, for pairs of strings with ranks."""
    candidates = sorted((ranks[pair], i) for i, pair in enumerate(pairwise(word)) if pair in ranks)
    results = Counter({tuple(word): rate ** len(candidates)})
    for skipped, (_, i) in enumerate(candidates):
        merged = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]
        for segmentation, probability in possible(merged, ranks, rate).items():
            results[segmentation] += rate**skipped * (1 - rate) * probability
    return results


CASES = [
    ("ab", [("a", "b")]),
    ("abc", [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]),
    ("aaaa", [("a", "a"), ("aa", "aa"), ("a", "aa")]),
    (
        "unrelated",
        [("r", "e"), ("a", "t"), ("l", "at"), ("u", "n"), ("at", "e"), ("re", "lat"), ("e", "d"), ("re", "l")],
    ),
]


@pytest.mark.parametrize(("word", "merges"), CASES)
def test_segmentations_have_the_paper_s_probabilities(word, merges):
    number, rate = 20_000, Fraction(3, 10)
    tokens = sorted({part for pair in merges for part in (*pair, "".join(pair))} | {*word, "<pad>", "</s>", "<unk>"})
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    roles = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    learnt = Merges.of(FastTokenizer(LibraryTokenizer(model), roles))
    ids = np.tile([tokens.index(character) for character in word], number)
    begins_word = np.tile([True] + [False] * (len(word) - 1), number)
    characters = Characters(ids.astype(np.int32), begins_word, np.arange(number + 1) * len(word))
    segmented = segment(characters, np.arange(number), learnt, float(rate), (0, 0, 0))
    drawn = Counter(tuple(tokens[i] for i in ids) for ids in segmented)
    expected = possible(list(word), {pair: rank for rank, pair in enumerate(merges)}, rate)
    assert sum(expected.values()) == 1
    assert drawn.keys() <= expected.keys()
    for segmentation, probability in expected.items():
        deviation = (number * float(probability * (1 - probability))) ** 0.5
        assert abs(drawn[segmentation] - number * float(probability)) <= 5 * deviation + 1, segmentation


def test_each_epoch_pair_and_side_has_its_own_and_other_pairs_do_not_matter(tokenizers):
    tokenizer = tokenizers[0]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 8)) for _ in range(30)]
    dropout, encoded = dropout_of(tokenizer, [*texts, texts[4]], 0.3, seed=3)
    again, _ = dropout_of(tokenizer, [*texts, texts[4]], 0.3, seed=3)
    other_seed, _ = dropout_of(tokenizer, [*texts, texts[4]], 0.3, seed=4)
    shorter, _ = dropout_of(tokenizer, ["a man", *texts[1:]], 0.3, seed=3)
    first, second = dropout.epoch(0, LARGE), dropout.epoch(1, LARGE)
    assert ids_of(first) == ids_of(again.epoch(0, LARGE))
    assert len({str(ids_of(pairs)) for pairs in (first, second, other_seed.epoch(0, LARGE))}) == 3
    assert [ids.tolist() for ids in first.sources(range(1, 30))] == [
        ids.tolist() for ids in shorter.epoch(0, LARGE).sources(range(1, 30))
    ]
    assert first.sources([4])[0].tolist() != first.sources([30])[0].tolist()
    assert tokenizer.decode(first.sources(range(31))) == tokenizer.decode(encoded.sources(range(31)))
    assert tokenizer.decode(second.targets(range(31))) == tokenizer.decode(encoded.targets(range(31)))
    assert all((ids[0], ids[-1]) == (1, tokenizer.eos_id) for ids in second.targets(range(31)))


@pytest.mark.parametrize("chunk", [1, 7, 30, 31])
def test_every_sentence_has_random_numbers_of_its_own(chunk, tokenizers, monkeypatch):
    """Equal sentences are segmented differently, however many are segmented together."""
    texts = [TEXT] * 31
    whole, _ = dropout_of(tokenizers[0], texts, 0.5)
    segmented = [ids.tolist() for ids in whole.epoch(0, LARGE).sources(range(31))]
    assert len(set(map(tuple, segmented))) == 31
    monkeypatch.setattr(bpe_dropout, "_CHUNK", chunk)
    parts, _ = dropout_of(tokenizers[0], texts, 0.5)
    assert [ids.tolist() for ids in parts.epoch(0, LARGE).sources(range(31))] == segmented


def test_what_becomes_too_long_stays_as_it_is(tokenizers):
    dropout, encoded = dropout_of(tokenizers[0], [TEXT, "a man", "der Hund läuft"], 0.9)
    longest = tuple(int(n) for n in encoded.lengths[2] + 3)
    epoch = dropout.epoch(0, [Bucket(*longest, 1)])
    free = dropout.epoch(0, LARGE)
    assert epoch.sources([0])[0].tolist() == encoded.sources([0])[0].tolist()
    assert epoch.targets([0])[0].tolist() == encoded.targets([0])[0].tolist()
    assert free.lengths[0, 0] > longest[0]
    for i in (1, 2):
        fits = (free.lengths[i] <= longest).all()
        expected = free if fits else encoded
        assert epoch.sources([i])[0].tolist() == expected.sources([i])[0].tolist()


def test_a_pair_that_no_bucket_holds_stays_as_it_is(tokenizers):
    """Its source is shorter than one bucket's, its target than another's."""
    dropout, encoded = dropout_of(tokenizers[0], [TEXT, "a man"], 0.9)
    free, (src_length, tgt_length) = dropout.epoch(0, LARGE), encoded.lengths[0].tolist()
    assert (free.lengths[0] > encoded.lengths[0]).all()
    buckets = [Bucket(src_length, 400, 1), Bucket(400, tgt_length, 1)]
    epoch = dropout.epoch(0, buckets)
    assert epoch.sources([0])[0].tolist() == encoded.sources([0])[0].tolist()
    assert epoch.targets([0])[0].tolist() == encoded.targets([0])[0].tolist()
    assert epoch.sources([1])[0].tolist() == free.sources([1])[0].tolist()


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_without_dropout_it_is_the_library_s_with_affixes(affix):
    library = LibraryTokenizer(models.BPE(unk_token="<unk>", **{affix: "##" if "prefix" in affix else "@"}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    options = {affix: "##" if "prefix" in affix else "@"}
    library.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=120, special_tokens=specials, **options))
    roles = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    dropout, encoded = dropout_of(FastTokenizer(library, roles), [TEXT, "der Hund"], 0.0)
    assert ids_of(dropout.epoch(0, LARGE)) == ids_of(encoded)
    assert (
        dropout_of(FastTokenizer(library, roles), [TEXT], 0.5)[0].epoch(0, LARGE).lengths[0, 0] > encoded.lengths[0, 0]
    )


def test_dropout_of_a_tokenizer_s_file_is_off(tokenizers, tmp_path):
    """`tokenizers` draws it without a seed."""
    document = json.loads(tokenizers[0].fast.to_str())
    document["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    fast = read_fast((tmp_path / "tokenizer.json").read_bytes(), "tokenizer.json")
    assert fast.encode(TEXT).ids == tokenizers[0].fast.encode(TEXT).ids


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    sentences = [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(60)]
    for name in ("src", "tgt"):
        (folder / name).write_text("\n".join(sentences) + "\n")
    return RunConfig(
        corpus=CorpusConfig(src=str(folder / "src"), tgt=str(folder / "tgt"), held_out=4),
        tokenizer=TokenizerConfig(split="bytes", vocab_size=330, bpe_dropout=0.2),
        batches=BatchConfig(tokens=200, shapes=3),
        model=TransformerConfig.preset("small", **SIZES),
        loop=LoopConfig(updates=24, validate_every=100, checkpoint_every=15, translations=0),
    )


def test_batches_of_a_resumed_run_are_the_same(run):
    """Every pair once per epoch, in batches that differ in number; the position of a checkpoint suffices to go on."""
    prepared = prepare(run)
    batches = prepared.batches()
    numbers = [len(batches.plan(epoch).batches) for epoch in range(4)]
    starts = np.cumsum([0, *numbers])
    for index in range(starts[-1]):
        epoch, number = batches.position(index)
        assert starts[epoch] + number == index
        assert number < numbers[epoch]
    index = int(starts[2] + 1)
    resumed = prepare(run).batches()
    resumed.resume(index, 2, 1)
    assert resumed.position(index) == (2, 1)
    for later in range(index, int(starts[-1])):
        for array, expected in zip(resumed[later].arrays, batches[later].arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
    tokens = [
        sum(int((batches[i].arrays.labels != 0).sum()) for i in range(starts[e], starts[e + 1])) for e in range(2)
    ]
    plain = sum(len(ids) - 1 for ids in prepared.train.encoded.targets(range(len(prepared.train.lengths))))
    assert plain < min(tokens)
    assert tokens[0] != tokens[1]


def test_training_resumes_with_the_next_batch(run, tmp_path, shared_programs):
    """Interrupted in the middle of an epoch."""
    quiet = Console(quiet=True)
    train(replace(run, loop=replace(run.loop, updates=15)), tmp_path, quiet)
    train(run, tmp_path, quiet)
    batches = prepare(run).batches()
    records = {record["update"]: record for record in read_metrics(tmp_path) if "checksum" in record}
    assert records.keys() == {*range(1, 25)}
    for update, record in records.items():
        assert record["tokens"] == (batches[update - 1].arrays.labels != 0).sum()
        assert (record["epoch"], record["batch"]) == batches.position(update - 1)
    assert records[24]["epoch"] >= 2
    assert records[15]["batch"] > 0


def test_ids_of_another_tokenizer_are_refused(tokenizers):
    ids = [np.array(tokenizers[0].encode([TEXT])[0])]
    with pytest.raises(DataError, match="bpe_dropout: the tokenizer splits a text differently with special tokens"):
        word_starts(tokenizers[1], [TEXT], ids)


def test_what_cannot_drop_merges_is_refused():
    with pytest.raises(ConfigError, match=r"bpe_dropout=0.1: needs kind='bpe', not 'word'"):
        TokenizerConfig(kind="word", bpe_dropout=0.1)
    with pytest.raises(ConfigError, match=r"bpe_dropout=1.0: must be at least 0 and below 1"):
        TokenizerConfig(bpe_dropout=1.0)
    with pytest.raises(DataError, match=r"^bpe_dropout: needs a BPE tokenizer; omit it, or train one"):
        Merges.of(train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=60), WORDS))
    model = models.BPE({"a": 0, "b": 1, "ab": 2, "<u>": 3}, [("a", "b")], ignore_merges=True)
    with pytest.raises(DataError, match=r"^bpe_dropout: the tokenizer has words that no merges give"):
        Merges.of(FastTokenizer(LibraryTokenizer(model), dict.fromkeys(("pad", "eos", "unk"), "<u>")))
    with pytest.raises(DataError, match=r"^bpe_dropout: the tokenizer has no merges; train one with a larger"):
        Merges.of(tokenizer_of(vocab_size=260))
