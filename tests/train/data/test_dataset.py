"""Encoding of pairs, dropped pairs, and batches, which do not depend on the number of workers."""

import os
import signal
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stores import store_of
from twinax.backend.errors import DataError
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import RunConfig
from twinax.train.data.buckets import Bucket, choose_buckets
from twinax.train.data.dataset import Batches, pad_rows
from twinax.train.data.encoding import Sides
from twinax.train.data.fitting import with_tokenizers
from twinax.train.data.prepare import prepare
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.tokenization import train_tokenizer

WORDS = ["a", "b", "c", "d", "e", "f", "g"]
TOKENIZER = train_tokenizer(TokenizerConfig(kind="word", vocab_size=50), [" ".join(WORDS)])
A, B = TOKENIZER.encode(["a"])[0][0], TOKENIZER.encode(["b"])[0][0]
SENTENCES = st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=9).map(" ".join)


def sides(longest=(8, 8), **settings):
    tokenizer = train_tokenizer(TokenizerConfig(kind="word", vocab_size=50, **settings), [" ".join(WORDS)])
    return Sides(tokenizer, TOKENIZER, [1], longest)


def test_special_tokens_around_sentences():
    dataset = store_of([("a", "b a")], sides(source_bos=True, source_eos=False))
    assert dataset.sources([0])[0].tolist() == [1, A]
    assert dataset.targets([0])[0].tolist() == [1, B, A, 2]
    assert dataset.lengths.tolist() == [[2, 3]]
    assert (dataset.counts.tokens, dataset.counts.unknown) == ((1, 2), (0, 0))
    src, tgt, labels = pad_rows(dataset, [0], Bucket(3, 4, 2), 0)
    assert src.tolist() == [[1, A, 0], [0, 0, 0]]
    assert tgt.tolist() == [[1, B, A, 0], [0, 0, 0, 0]]
    assert labels.tolist() == [[B, A, 2, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("start", [0, 2, 7])
def test_targets_begin_with_the_decoder_s_start(start):
    """The start token is EOS in BART and padding in Marian, not BOS."""
    dataset = store_of([("a", "b a")], sides()._replace(first_ids=[start]))
    assert dataset.targets([0])[0].tolist() == [start, B, A, 2]
    assert pad_rows(dataset, [0], Bucket(3, 4, 1), 0).tgt_tokens.tolist() == [[start, B, A, 0]]


@pytest.mark.parametrize("pair", [("  ", "a"), ("a", " \t"), (" \u00a0 ", "a"), ("", "a")])
def test_spaces_alone_are_an_empty_side(pair):
    """A byte tokenizer encodes spaces as tokens."""
    byte_tokenizer = train_tokenizer(TokenizerConfig(split="bytes", vocab_size=300), ["a b"])
    assert all(byte_tokenizer.encode([text])[0] for text in pair if text)
    dataset = store_of([pair, ("a", "b")], Sides(byte_tokenizer, byte_tokenizer, [1], (20, 20)), texts=True)
    assert (dataset.texts(2), dataset.counts.empty) == ([("a", "b")], 1)


@given(st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=30))
def test_every_pair_is_kept_or_counted(pairs):
    pairs = [("  " if i % 3 == 0 and not a else a, b) for i, (a, b) in enumerate(pairs)]  # spaces are nothing
    lengths = [(len(a.split()), len(b.split())) for a, b in pairs]
    empty = [not a or not b for a, b in lengths]
    long = [a + 1 > 6 or b + 1 > 5 for a, b in lengths]
    expected = [i for i in range(len(pairs)) if not empty[i] and not long[i]]
    if not expected:
        with pytest.raises(DataError, match=f"all {len(pairs)} pairs are dropped: {sum(empty)} have an empty side"):
            store_of(pairs, sides((6, 5)))
        return
    dataset = store_of(pairs, sides((6, 5)), texts=True)
    counts = dataset.counts
    for number in (0, len(pairs) // 2, len(pairs)):
        assert dataset.texts(number) == [pairs[i] for i in expected if i < number]
    assert counts.read == len(pairs) == counts.kept + counts.empty + counts.too_long
    assert counts.empty == sum(empty)
    assert counts.tokens == tuple(sum(lengths[i][side] for i in expected) for side in (0, 1))
    assert counts.unknown == tuple(sum(pairs[i][side].split().count("unknown") for i in expected) for side in (0, 1))
    assert TOKENIZER.decode(dataset.sources(range(len(expected)))) == [
        " ".join(word for word in pairs[i][0].split() if word != "unknown") for i in expected
    ]


def corpus(pairs=300, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(2)) for _ in range(pairs)]


@pytest.fixture
def ctrl_c():
    """SIGINT ends processes, also where a shell has started the tests in the background, with SIGINT ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("ctrl_c")
def test_batches_do_not_depend_on_who_makes_them():
    dataset = store_of(corpus(), sides())
    buckets = choose_buckets(dataset.lengths, 60, 4)
    total = Batches(dataset, buckets, 0, 7, 0).per_epoch * 2 + 3
    batches = Batches(dataset, buckets, 0, 7, total)
    expected = list(batches.read(0))
    assert len(expected) == total
    assert [(batch.epoch, batch.number) for batch in expected] == [divmod(i, batches.per_epoch) for i in range(total)]
    assert all(batches.plan(batch.epoch).buckets[batch.number] == batch.bucket for batch in expected)
    assert all(len(batches.plan(epoch).batches) == batches.per_epoch for epoch in range(3))
    for epoch in (0, 1):  # every pair once
        part = expected[epoch * batches.per_epoch : (epoch + 1) * batches.per_epoch]
        rows = sorted(tuple(row[row != 0]) for batch in part for row in batch.arrays.src_tokens if row.any())
        assert rows == sorted(tuple(ids) for ids in dataset.sources(range(len(dataset))))
    start = batches.per_epoch - 2
    for workers in (0, 3):
        for a, b in zip(expected[start:], batches.read(start, workers), strict=True):
            assert a[:3] == b[:3]
            assert all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))
            for worker in active_children():  # Ctrl-C reaches them too, the first time while some are starting
                os.kill(worker.pid, signal.SIGINT)
    other_seed = Batches(dataset, buckets, 0, 8, total)
    assert any(
        not np.array_equal(a.arrays.src_tokens, b.arrays.src_tokens)
        for a, b in zip(expected, other_seed.read(0), strict=True)
    )


@pytest.fixture
def files(tmp_path):
    pairs = [*corpus(100), ("", "a"), ("a b c d e f g a b c", "a")]
    for side, name in enumerate(("src", "tgt")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    return {name: str(tmp_path / name) for name in ("src", "tgt")}


def test_prepare_fits_the_model_to_the_tokenizer_and_counts(files):
    lines = []
    order = ("unk", "eos", "pad", "bos")
    run = RunConfig(
        corpus=CorpusConfig(**files, held_out=20),
        tokenizer=TokenizerConfig(kind="word", special_order=order),
        batches=BatchConfig(max_src_length=9, tokens=50, shapes=3),
    )
    data = prepare(run, say=lines.append)
    model = data.run.model
    assert model.src_vocab_size == model.tgt_vocab_size == len(WORDS) + 4
    assert (model.eos_id, model.pad_id, model.bos_id, model.decoder_start_id) == (1, 2, 3, 3)
    (part,) = data.valid
    assert len(part.references) == len(part.pairs)
    targets = part.pairs.targets(range(len(part.pairs)))
    assert data.tokenizers.tgt.decode([ids[1:-1] for ids in targets]) == part.references
    counts = data.counts
    assert sum(c.read for c in counts.values()) == 102
    assert sum(c.empty for c in counts.values()) == sum(c.too_long for c in counts.values()) == 1
    assert any("dropped 1 with an empty side" in line for line in lines)
    assert len(data.buckets) <= 3
    assert data.run.tokenizer.vocab_size == 1000  # the smallest, for so few pairs
    assert data.run.loop.updates == 2000


@pytest.mark.parametrize("held_out", [None, 20])
def test_both_directions(files, held_out):
    """The swapped pairs follow the others, with the same tokenizer; no held-out pair is trained on when swapped."""

    def texts(data, part):
        pairs = data.train if part == "train" else data.valid[0].pairs
        src, tgt = (side(range(len(pairs))) for side in (pairs.sources, pairs.targets))
        decode = data.tokenizers.tgt.decode
        return list(zip(decode([ids[:-1] for ids in src]), decode([ids[1:-1] for ids in tgt]), strict=True))

    for name in ("src", "tgt"):  # words that occur once
        path = Path(files[name])
        path.write_text(path.read_text() + f"{name} a\n")
    validation = {"valid_src": files["src"], "valid_tgt": files["tgt"]} if held_out is None else {}
    one, both = (
        prepare(
            RunConfig(
                corpus=CorpusConfig(**files, **validation, held_out=held_out),
                both_directions=both_directions,
                tokenizer=TokenizerConfig(kind="word", min_frequency=2),
            )
        )
        for both_directions in (False, True)
    )
    assert both.run.model == one.run.model
    assert both.run.tokenizer == one.run.tokenizer
    for part in ("train", "valid"):
        pairs = texts(one, part)
        assert texts(both, part) == pairs + [pair[::-1] for pair in pairs]
    assert both.valid[0].references == one.valid[0].references  # BLEU is that of one direction


def test_both_directions_need_one_tokenizer_without_languages(files):
    run = RunConfig(corpus=CorpusConfig(**files), both_directions=True)
    other_tokenizer = train_tokenizer(TokenizerConfig(kind="word"), WORDS)
    multilingual = train_tokenizer(TokenizerConfig(kind="word"), WORDS)
    multilingual.languages = object()
    for tokenizers in (Tokenizers(TOKENIZER, other_tokenizer), Tokenizers(multilingual, multilingual)):
        with pytest.raises(DataError, match=r"both_directions=True: .* use one tokenizer for both sides, without"):
            prepare(run, tokenizers)


def test_weights_that_exist_keep_their_sizes(files):
    run = RunConfig(corpus=CorpusConfig(**files, held_out=20), tokenizer=TokenizerConfig(kind="word"))
    model = prepare(run).run.model
    larger_model = model.replace(src_vocab_size=30, tgt_vocab_size=30)
    assert prepare(run, sizes=larger_model).run.model == larger_model
    smaller_model = model.replace(src_vocab_size=10, tgt_vocab_size=10)
    with pytest.raises(DataError, match=r"the src tokenizer has 1 tokens beyond the model's 10 \(the first: "):
        prepare(run, sizes=smaller_model)
    with pytest.raises(DataError, match="the src tokenizer has pad_id=0 but the model has 3"):
        prepare(run, sizes=model.replace(pad_id=3))
    other_tokenizer = train_tokenizer(TokenizerConfig(kind="word", special_order=("unk", "pad", "bos", "eos")), WORDS)
    with pytest.raises(DataError, match="padding 1 and 0: they must have the same id"):
        with_tokenizers(run.model, Tokenizers(other_tokenizer, TOKENIZER))


def test_too_few_pairs(files):
    with pytest.raises(DataError, match="has 102 pairs, of which 102 are held out"):
        prepare(RunConfig(corpus=CorpusConfig(**files, held_out=102)))


def test_tokenizers_of_each_side_are_saved_and_loaded(tmp_path):
    other_tokenizer = train_tokenizer(TokenizerConfig(kind="word"), ["x y"])
    for pair in (Tokenizers(TOKENIZER, TOKENIZER), Tokenizers(TOKENIZER, other_tokenizer)):
        folder = tmp_path / str(pair[1].vocab_size)
        pair.save(folder)
        tokenizers = Tokenizers.load(folder)
        assert [t.vocab_size for t in tokenizers] == [t.vocab_size for t in pair]
        assert (tokenizers.src is tokenizers.tgt) == (pair.src is pair.tgt)
    assert Tokenizers.load(tmp_path) is None
