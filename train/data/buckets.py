"""Which sentence pairs stand in which batch: few shapes, little padding, an order that a seed and an epoch determine.

Letters: P pairs, K shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

# Pairs that the choice of shapes looks at. Among more, what does not fill a batch is next to nothing.
_SAMPLE = 100_000


class Bucket(NamedTuple):
    """A shape of batches."""

    src_length: int  # to which sources are padded
    tgt_length: int
    sentences: int  # rows


def choose_buckets(lengths: np.ndarray, tokens: int, number: int = 16) -> list[Bucket]:
    """At most `number` shapes that hold all pairs of lengths (P, 2) with little padding; smallest sources first.

    From an even cut of the pairs, by source and then by target length, each shape is made a little longer or shorter
    as long as that saves padding of the pairs, then as long as it saves padding of an epoch's batches. A batch has at
    most `tokens` tokens a side, padding included, or one sentence.
    """
    lengths = np.asarray(lengths)
    longest, every = lengths.max(0), -(-len(lengths) // _SAMPLE)
    sample = lengths[::every]
    pairs, counts = np.unique(sample, axis=0, return_counts=True)
    shapes = [longest]
    for part in np.array_split(sample[np.argsort(sample[:, 0], kind="stable")], max(1, number // 2)):
        halves = np.array_split(part[np.argsort(part[:, 1], kind="stable")], 2)
        shapes += [np.array([part[:, 0].max(), half[:, 1].max()]) for half in halves if len(half)]
    chosen = np.unique(np.minimum(shapes[:number], longest), axis=0)
    chosen = _improve(chosen, lambda shapes: _tokens_of_pairs(shapes, pairs, counts))
    if every == 1:
        chosen = _improve(chosen, lambda shapes: _tokens_of_epoch(shapes, pairs, counts, tokens))
        while not (used := _batches(chosen, pairs, counts, tokens) > 0).all():  # pairs of a few go on in another
            chosen = chosen[used]
    return [Bucket(int(s), int(t), _sentences(s, t, tokens)) for s, t in np.unique(chosen, axis=0)]


def square_buckets(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same shapes with sources and targets of one length."""
    return sorted({Bucket(max(src, tgt), max(src, tgt), sentences) for src, tgt, sentences in buckets})


def _improve(shapes: np.ndarray, cost: Callable[[np.ndarray], int]) -> np.ndarray:
    """Shapes (K, 2) that no small change of one makes cheaper; the longest stays, for what no other holds."""
    longest, fewest, moved = shapes.max(0), cost(shapes), True
    while moved:
        moved = False
        for i, *step in product(range(len(shapes)), (-2, -1, 0, 1, 2), (-2, -1, 0, 1, 2)):
            if (shapes[i] == longest).all():
                continue
            changed = shapes.copy()
            changed[i] = np.clip(changed[i] + step, 1, longest)
            if (now := cost(changed)) < fewest:
                shapes, fewest, moved = changed, now, True
    return shapes


def _sentences(src_length: int, tgt_length: int, tokens: int) -> int:
    return max(1, int(tokens // max(src_length, tgt_length)))


def _tokens_of_pairs(shapes: np.ndarray, pairs: np.ndarray, counts: np.ndarray) -> int:
    """Tokens of all pairs (P, 2), each in the cheapest shape (K, 2) that holds it."""
    return int((shapes.sum(1)[_own_shape(shapes, pairs)] * counts).sum())


def _tokens_of_epoch(shapes: np.ndarray, pairs: np.ndarray, counts: np.ndarray, tokens: int) -> int:
    """Tokens of both sides of all batches, padding and empty rows too, as `plan_epoch` fills them."""
    sizes = np.array([_sentences(s, t, tokens) for s, t in shapes])
    return int((_batches(shapes, pairs, counts, tokens) * sizes * shapes.sum(1)).sum())


def _batches(shapes: np.ndarray, pairs: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
    """(K,) batches of each shape in an epoch."""
    waiting = np.bincount(_own_shape(shapes, pairs), counts, len(shapes)).astype(int)
    return _filled(shapes, waiting, [_sentences(s, t, tokens) for s, t in shapes])


def _filled(shapes: np.ndarray, own: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """(K,) batches of each shape, as `plan_epoch` fills them with the pairs (K,) that are each one's own."""
    waiting, batches = own.copy(), np.zeros(len(shapes), int)
    for i, nearest in _smallest_first(shapes):
        full, rest = divmod(int(waiting[i]), sizes[i])
        if rest and nearest is not None:
            waiting[nearest] += rest
            rest = 0
        batches[i] = full + (rest > 0)
    return batches


def _own_shape(shapes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(P,) the number of the cheapest shape (K, 2) that holds each pair (P, 2)."""
    order = _by_cost(shapes)
    fits = (shapes[order][None] >= lengths[:, None]).all(-1)
    return order[fits.argmax(1)]


def _by_cost(shapes: np.ndarray) -> np.ndarray:
    """Numbers of the shapes, the cheapest first; of equal ones that with the shorter sources, wherever it stands."""
    return np.lexsort((shapes[:, 0], shapes.sum(1)))


def _smallest_first(shapes: np.ndarray) -> Iterator[tuple[int, int | None]]:
    """(number of a shape, the cheapest other one that holds its pairs), so that the latter comes later."""
    order = _by_cost(shapes)
    for place, i in enumerate(order):
        larger = [j for j in order[place + 1 :] if (shapes[j] >= shapes[i]).all()]
        yield int(i), int(larger[0]) if larger else None


def count_batches(lengths: np.ndarray, buckets: Sequence[Bucket]) -> int:
    """Number of batches of every epoch: `plan_epoch` makes as many."""
    shapes = np.array([bucket[:2] for bucket in buckets])
    own = np.bincount(_own_shape(shapes, np.asarray(lengths)), minlength=len(shapes))
    return int(_filled(shapes, own, [bucket.sentences for bucket in buckets]).sum())


class Plan(NamedTuple):
    """The batches of an epoch, in their order: numbers of pairs, and the number of each batch's bucket."""

    batches: list[np.ndarray]
    buckets: list[int]


def plan_epoch(lengths: np.ndarray, buckets: Sequence[Bucket], seed: int, epoch: int) -> Plan:
    """Every pair once, in batches of one bucket each; what does not fill a batch goes on in a larger bucket.

    The same for equal arguments, whoever asks and however many workers make the batches.
    """
    rng = np.random.default_rng([seed, epoch])
    shuffled, shapes = rng.permutation(len(lengths)), np.array([bucket[:2] for bucket in buckets])
    own = _own_shape(shapes, np.asarray(lengths)[shuffled])
    waiting = [shuffled[own == i] for i in range(len(buckets))]
    batches, numbers = [], []
    for i, nearest in _smallest_first(shapes):
        size = buckets[i].sentences
        rows = [waiting[i][start : start + size] for start in range(0, len(waiting[i]), size)]
        if rows and len(rows[-1]) < size and nearest is not None:
            waiting[nearest] = np.concatenate([waiting[nearest], rows.pop()])
        batches += rows
        numbers += [i] * len(rows)
    order = rng.permutation(len(batches))
    return Plan([batches[i] for i in order], [numbers[i] for i in order])
