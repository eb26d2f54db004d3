"""The pairs of several corpora, each a number of times per epoch."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol

import numpy as np

from .buckets import Bucket
from .dataset import Epochs, Pairs
from .encoding import Counts


class Corpus(Epochs, Protocol):
    """Encoded pairs with what is known of them."""

    @property
    def counts(self) -> Counts:
        """What was read, kept and dropped."""
        ...

    def fingerprint(self) -> str:
        """A hash of all ids."""
        ...


class MixedCorpus:
    """Of each corpus, `copies` of every pair per epoch; a fraction is another part of its pairs in every epoch."""

    def __init__(self, corpora: Sequence[Corpus], copies: Sequence[float]):
        self.corpora, self.copies = corpora, copies
        self.is_varying = any(c.is_varying or n % 1 for c, n in zip(corpora, copies, strict=True))
        self.lengths = np.concatenate([corpus.lengths for corpus in corpora])
        self.counts = Counts()
        for corpus in corpora:
            self.counts = self.counts.plus(corpus.counts)

    def __reduce__(self) -> tuple[type["MixedCorpus"], tuple[Sequence[Corpus], Sequence[float]]]:
        return MixedCorpus, (self.corpora, self.copies)  # without the lengths, which a worker process reads itself

    def fingerprint(self) -> str:
        """A hash of all ids and of the copies; of one corpus, its own."""
        values = [f"{c.fingerprint()} {n}" for c, n in zip(self.corpora, self.copies, strict=True)]
        if len(values) == 1 and self.copies[0] == 1:
            return self.corpora[0].fingerprint()
        return sha256("\n".join(values).encode()).hexdigest()[:16]

    def epoch(self, number: int, buckets: Sequence[Bucket]) -> "MixedPairs":
        """The pairs of an epoch."""
        blocks: list[tuple[Pairs, np.ndarray | None]] = []
        for i, (corpus, copies) in enumerate(zip(self.corpora, self.copies, strict=True)):
            pairs = corpus.epoch(number, buckets)
            blocks += [(pairs, None)] * int(copies)
            if copies % 1:
                blocks.append((pairs, _turn(len(corpus.lengths), copies % 1, i, number)))
        return MixedPairs(blocks)


def _turn(total: int, share: float, corpus: int, epoch: int) -> np.ndarray:
    """The numbers of a share of `total` pairs: those whose turn it is, in a fixed order, after the earlier epochs'."""
    order = np.random.default_rng([1, corpus, total]).permutation(total)
    begin, end = (round(share * total * n) for n in (epoch, epoch + 1))
    return order[np.arange(begin, end) % total]


class MixedPairs:
    """Blocks of pairs one after another; of a block, all pairs or those with some numbers."""

    def __init__(self, blocks: Sequence[tuple[Pairs, np.ndarray | None]]):
        self._blocks = blocks
        parts = [pairs.lengths if rows is None else pairs.lengths[rows] for pairs, rows in blocks]
        self._ends = np.cumsum([len(part) for part in parts])
        self.lengths = np.concatenate(parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def sources(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the sources of these pairs."""
        return self._sentences(rows, "sources")

    def targets(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the targets of these pairs, start and end included."""
        return self._sentences(rows, "targets")

    def _sentences(self, rows: Iterable[int], side: str) -> list[np.ndarray]:
        numbers = np.fromiter(rows, np.int64)
        places = np.searchsorted(self._ends, numbers, "right")
        sentences: list[np.ndarray] = [np.empty(0)] * len(numbers)
        for place in np.unique(places).tolist():
            pairs, own_rows = self._blocks[place]
            where = np.flatnonzero(places == place)
            local = numbers[where] - (self._ends[place - 1] if place else 0)
            local = local if own_rows is None else own_rows[local]
            for i, ids in zip(where.tolist(), getattr(pairs, side)(local), strict=True):
                sentences[i] = ids
        return sentences
