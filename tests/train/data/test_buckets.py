"""Batch shapes and their order: every pair once, little padding, determined by seed and epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax.train.data.buckets import Bucket, Plan, choose_buckets, introduce_gradually, plan_epoch, square_buckets


def sentences(pairs, seed=0):
    """Random sentence lengths; a target is about as long as its source."""
    rng = np.random.default_rng(seed)
    src = np.clip(rng.gamma(7, 2, pairs), 2, 60).astype(int)
    return np.stack([src, np.clip(src * rng.normal(1.1, 0.2, pairs), 2, 60).astype(int)], axis=1)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60),
    tokens=st.integers(1, 200),
    number=st.integers(1, 16),
    epoch=st.integers(0, 3),
)
def test_every_pair_once_in_a_batch_that_holds_it(lengths, tokens, number, epoch):
    lengths = np.array(lengths)
    buckets = choose_buckets(lengths, tokens, number)
    assert 1 <= len(buckets) <= number
    assert len(set(buckets)) == len(buckets)
    plan = plan_epoch(lengths, buckets, 5, epoch)
    assert sorted(np.concatenate(plan.batches)) == list(range(len(lengths)))
    assert {*plan.buckets} == {*range(len(buckets))}  # every bucket occurs in the plan
    for rows, i in zip(plan.batches, plan.buckets, strict=True):
        src, tgt, batch_size = buckets[i]
        assert 1 <= len(rows) <= batch_size
        assert batch_size == 1 or batch_size * max(src, tgt) <= tokens
        assert (lengths[rows] <= (src, tgt)).all()


def test_the_order_follows_from_seed_and_epoch():
    lengths = sentences(500)
    buckets = choose_buckets(lengths, 200)

    def order(seed, epoch):
        plan = plan_epoch(lengths, buckets, seed, epoch)
        return [rows.tolist() for rows in plan.batches], plan.buckets

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert len(set(order(1, 2)[1][:20])) > 3  # shapes are mixed


@pytest.mark.parametrize(("pairs", "tokens"), [(3000, 512), (29000, 4096)])
def test_little_padding(pairs, tokens):
    """At most 12% padding over both sides, empty rows included."""
    lengths = sentences(pairs)
    buckets = choose_buckets(lengths, tokens)
    plan = plan_epoch(lengths, buckets, 0, 0)
    positions = sum(buckets[i].sentences * (buckets[i].src_length + buckets[i].tgt_length) for i in plan.buckets)
    assert 1 - lengths.sum() / positions <= 0.12
    one = choose_buckets(lengths, tokens, 1)
    assert len(one) == 1
    assert len(lengths) * sum(one[0][:2]) > 1.8 * positions


def test_many_pairs_are_sampled():
    lengths = sentences(250_001)
    lengths[17] = 90, 3  # a length that the sample lacks still fits
    buckets = choose_buckets(lengths, 4096)
    assert sorted(np.concatenate(plan_epoch(lengths, buckets, 0, 0).batches)) == list(range(len(lengths)))


def test_equal_lengths_are_one_shape():
    assert choose_buckets(np.full((7, 2), 5), 20) == [Bucket(5, 5, 4)]
    plan = plan_epoch(np.full((7, 2), 5), [Bucket(5, 5, 4)], 0, 0)
    assert sorted(map(len, plan.batches)) == [3, 4]


def test_a_pair_longer_than_a_batch_is_one_of_its_own():
    assert choose_buckets(np.array([[30, 4]]), 20) == [Bucket(30, 4, 1)]


def test_square_shapes_hold_what_they_held():
    """Equal shapes are merged."""
    buckets = [Bucket(5, 9, 23), Bucket(9, 5, 23), Bucket(4, 3, 7)]
    assert square_buckets(buckets) == [Bucket(4, 4, 7), Bucket(9, 9, 23)]


@given(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=200))
def test_shapes_begin_one_after_the_other(numbers):
    """Each begins later than the one before, unless nothing else remains."""
    plan = Plan([np.array([i]) for i in range(len(numbers))], numbers)
    gradual = introduce_gradually(plan)
    pairs = [int(rows[0]) for rows in gradual.batches]
    assert sorted(pairs) == list(range(len(numbers)))
    assert gradual.buckets == [numbers[i] for i in pairs]
    shapes = list(dict.fromkeys(numbers))
    assert list(dict.fromkeys(gradual.buckets)) == shapes
    for shape in shapes:  # in the order of the plan
        own = [i for i in pairs if numbers[i] == shape]
        assert own == sorted(own)
    begins = [gradual.buckets.index(shape) for shape in shapes]
    interval = min(30, len(numbers) // (2 * len(shapes)))
    for rank, begin in enumerate(begins):
        remains = any(numbers[i] in shapes[:rank] for i in pairs[begin:])
        assert begin >= interval * rank or not remains
        assert begin <= numbers.index(shapes[rank]) + interval * rank
