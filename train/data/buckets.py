"""Assigns sentence pairs to batches: few shapes, little padding, and an order that seed and epoch determine.

Letters: P pairs, K shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop
from itertools import product
from typing import NamedTuple

import numpy as np

# Pairs on which shapes are chosen. In larger corpora, batches that are not full are negligible.
_SAMPLE = 100_000
_BLOCK = 1_000_000  # pairs looked at together, so that memory does not grow with the corpus
_INTERVAL = 30  # batches, at most, between the beginnings of two shapes


class Bucket(NamedTuple):
    """A batch shape."""

    src_length: int  # padded
    tgt_length: int
    sentences: int  # rows


def choose_buckets(lengths: np.ndarray, tokens: int, number: int = 16) -> list[Bucket]:
    """At most `number` shapes that hold all pairs of lengths (P, 2) with little padding, sorted by source length.

    The pairs are split evenly, first by source and then by target length. Each shape is then lengthened or shortened in
    small steps, first while that reduces the padding of the pairs, then while it reduces the padding of an epoch's
    batches. A batch has at most `tokens` tokens per side, padding included, or one sentence.
    """
    lengths = np.asarray(lengths)
    longest = lengths.max(0).astype(int)
    stride = -(-len(lengths) // _SAMPLE)
    sample = lengths[::stride].astype(int)
    pairs, counts = np.unique(sample, axis=0, return_counts=True)
    shapes = [longest]
    for part in np.array_split(sample[np.argsort(sample[:, 0], kind="stable")], max(1, number // 2)):
        halves = np.array_split(part[np.argsort(part[:, 1], kind="stable")], 2)
        shapes += [np.array([part[:, 0].max(), half[:, 1].max()]) for half in halves if len(half)]
    candidates = np.unique(np.minimum(shapes[:number], longest), axis=0)
    candidates = _improve(candidates, lambda shapes: _tokens_of_pairs(shapes, pairs, counts))
    if stride == 1:
        candidates = _improve(candidates, lambda shapes: _tokens_of_epoch(shapes, pairs, counts, tokens))
        # Remove shapes without batches: their few pairs fill larger ones.
        while not (used := _batches(candidates, pairs, counts, tokens) > 0).all():
            candidates = candidates[used]
    return [Bucket(int(s), int(t), _sentences(s, t, tokens)) for s, t in np.unique(candidates, axis=0)]


def square_buckets(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same shapes with sources and targets of equal length."""
    return sorted({Bucket(max(src, tgt), max(src, tgt), sentences) for src, tgt, sentences in buckets})


def _improve(shapes: np.ndarray, cost: Callable[[np.ndarray], int]) -> np.ndarray:
    """Shapes (K, 2) at a local minimum of the cost; the longest is fixed, because it must hold every pair."""
    longest, lowest, improved = shapes.max(0), cost(shapes), True
    while improved:
        improved = False
        for i, *step in product(range(len(shapes)), (-2, -1, 0, 1, 2), (-2, -1, 0, 1, 2)):
            if (shapes[i] == longest).all():
                continue
            candidate = shapes.copy()
            candidate[i] = np.clip(candidate[i] + step, 1, longest)
            if (candidate_cost := cost(candidate)) < lowest:
                shapes, lowest, improved = candidate, candidate_cost, True
    return shapes


def _sentences(src_length: int, tgt_length: int, tokens: int) -> int:
    return max(1, int(tokens // max(src_length, tgt_length)))


def _tokens_of_pairs(shapes: np.ndarray, pairs: np.ndarray, counts: np.ndarray) -> int:
    """Tokens of all pairs (P, 2), each in the cheapest shape (K, 2) that holds it."""
    return int((shapes.sum(1)[_own_shape(shapes, pairs)] * counts).sum())


def _tokens_of_epoch(shapes: np.ndarray, pairs: np.ndarray, counts: np.ndarray, tokens: int) -> int:
    """Tokens on both sides of all batches that `plan_epoch` makes, padding and empty rows included."""
    sizes = np.array([_sentences(s, t, tokens) for s, t in shapes])
    return int((_batches(shapes, pairs, counts, tokens) * sizes * shapes.sum(1)).sum())


def _batches(shapes: np.ndarray, pairs: np.ndarray, counts: np.ndarray, tokens: int) -> np.ndarray:
    """(K,) number of batches per shape in an epoch."""
    waiting = np.bincount(_own_shape(shapes, pairs), counts, len(shapes)).astype(int)
    return _count_filled(shapes, waiting, [_sentences(s, t, tokens) for s, t in shapes])


def _count_filled(shapes: np.ndarray, own_pairs: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """(K,) number of batches per shape that `plan_epoch` makes; `own_pairs` (K,) is how many each shape is assigned."""
    waiting, batches = own_pairs.copy(), np.zeros(len(shapes), int)
    for i, next_larger in _smallest_first(shapes):
        full, remainder = divmod(int(waiting[i]), sizes[i])
        if remainder and next_larger is not None:
            waiting[next_larger] += remainder
            remainder = 0
        batches[i] = full + (remainder > 0)
    return batches


def _own_shape(shapes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(P,) index of the cheapest shape (K, 2) that holds each pair (P, 2)."""
    order = _by_cost(shapes)
    sizes = [np.unique(side) for side in shapes.T]
    # which shape it is depends only on the smallest size of each side that holds a pair
    grid = np.stack(np.meshgrid(*sizes, indexing="ij"), axis=-1)
    fits = (shapes[order] >= grid[:, :, None]).all(-1)
    table = order[fits.argmax(-1)].astype(np.uint16)
    places = [np.searchsorted(size, np.arange(size[-1] + 1)) for size in sizes]  # by length
    own_shapes = np.empty(len(lengths), np.uint16)
    for start in range(0, len(lengths), _BLOCK):
        src, tgt = lengths[start : start + _BLOCK].T
        own_shapes[start : start + _BLOCK] = table[places[0].take(src, mode="clip"), places[1].take(tgt, mode="clip")]
    return own_shapes


def _by_cost(shapes: np.ndarray) -> np.ndarray:
    """Indices of the shapes, cheapest first; ties are ordered by source length."""
    return np.lexsort((shapes[:, 0], shapes.sum(1)))


def _smallest_first(shapes: np.ndarray) -> Iterator[tuple[int, int | None]]:
    """(index of a shape, index of the cheapest other shape that holds its pairs); the other one always comes later."""
    order = _by_cost(shapes)
    for rank, i in enumerate(order):
        larger = [j for j in order[rank + 1 :] if (shapes[j] >= shapes[i]).all()]
        yield int(i), int(larger[0]) if larger else None


def count_batches(lengths: np.ndarray, buckets: Sequence[Bucket]) -> int:
    """Number of batches per epoch, the same as in `plan_epoch`."""
    shapes = np.array([bucket[:2] for bucket in buckets])
    own_pairs = np.bincount(_own_shape(shapes, np.asarray(lengths)), minlength=len(shapes))
    return int(_count_filled(shapes, own_pairs, [bucket.sentences for bucket in buckets]).sum())


class Plan(NamedTuple):
    """The batches of an epoch in order: the indices of their pairs, and the index of each batch's bucket."""

    batches: list[np.ndarray]
    buckets: list[int]


def plan_epoch(lengths: np.ndarray, buckets: Sequence[Bucket], seed: int, epoch: int) -> Plan:
    """Every pair once, in batches of one bucket each; pairs that do not fill a batch move to a larger bucket.

    Deterministic: equal arguments give equal plans, in any process and with any number of workers.
    """
    rng = np.random.default_rng([seed, epoch])
    shuffled = np.arange(len(lengths), dtype=np.uint32 if len(lengths) < 2**32 else np.int64)
    rng.shuffle(shuffled)
    shapes = np.array([bucket[:2] for bucket in buckets])
    own_shapes = _own_shape(shapes, np.asarray(lengths))
    blocks = [shuffled[start : start + _BLOCK] for start in range(0, len(shuffled), _BLOCK)]
    parts = [_split(block, own_shapes[block], len(buckets)) for block in blocks]
    waiting = [np.concatenate(own) for own in zip(*parts, strict=True)]
    del shuffled, own_shapes, blocks, parts
    batches, numbers = [], []
    for i, next_larger in _smallest_first(shapes):
        size = buckets[i].sentences
        rows = [waiting[i][start : start + size] for start in range(0, len(waiting[i]), size)]
        if rows and len(rows[-1]) < size and next_larger is not None:
            waiting[next_larger] = np.concatenate([waiting[next_larger], rows.pop()])
        batches += rows
        numbers += [i] * len(rows)
    order = rng.permutation(len(batches))
    return Plan([batches[i] for i in order], [numbers[i] for i in order])


def _split(pairs: np.ndarray, own_shapes: np.ndarray, number: int) -> list[np.ndarray]:
    """The pairs of each shape, in their order."""
    order = np.argsort(own_shapes, kind="stable")
    return np.split(pairs[order], np.cumsum(np.bincount(own_shapes, minlength=number))[:-1])


def introduce_gradually(plan: Plan) -> Plan:
    """The same batches, reordered so that shapes begin one after the other, within the first half of the plan.

    A program is compiled for each shape, and the first ones are trained on while the others compile. Among the shapes
    that have begun, the order is that of the plan.
    """
    shapes = list(dict.fromkeys(plan.buckets))
    interval = min(_INTERVAL, len(plan.buckets) // (2 * len(shapes)))
    positions = {shape: [i for i, number in enumerate(plan.buckets) if number == shape] for shape in shapes}
    waiting: list[int] = []  # heap of the positions of the shapes that have begun
    order: list[int] = []
    for number in range(len(plan.buckets)):
        while shapes and (not waiting or number >= interval * (len(positions) - len(shapes))):
            waiting += positions[shapes.pop(0)]
            heapify(waiting)
        order.append(heappop(waiting))
    return Plan([plan.batches[i] for i in order], [plan.buckets[i] for i in order])


def describe_shapes(buckets: Sequence[Bucket]) -> str:
    """One line with the batch shapes."""
    noun = "shape" if len(buckets) == 1 else "shapes"
    shapes = ", ".join(f"{b.sentences}×({b.src_length}+{b.tgt_length})" for b in buckets)
    return f"{len(buckets)} batch {noun}, rows×(source+target tokens): {shapes}"
