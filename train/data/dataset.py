"""Pairs of sentences as arrays of ids, and batches of them in the order of the plan.

Letters: P pairs, B rows, S source length, T target length.
"""

import signal
from collections.abc import Generator, Iterable, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...configs.errors import DataError
from ...formulas.padding import Ids, pad
from .buckets import Bucket, Plan, count_batches, plan_epoch
from .tokenization import Tokenizer

_CHUNK = 10_000  # pairs that are encoded at once
_AHEAD = 8  # batches that are made before they are asked for


class Encoded(NamedTuple):
    """P pairs: the ids of all sentences of a side one behind the other, each with its special tokens."""

    src: np.ndarray
    src_starts: np.ndarray  # (P + 1,) where each begins, and where the last ends
    tgt: (
        np.ndarray
    )  # start token, sentence, end token: the decoder reads all but the last, labels are all but the first
    tgt_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.src_starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(P, 2): tokens that the encoder and that the decoder reads."""
        return np.stack([np.diff(self.src_starts), np.diff(self.tgt_starts) - 1], axis=1)

    def sources(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the sources of some pairs."""
        return [self.src[self.src_starts[i] : self.src_starts[i + 1]] for i in rows]

    def targets(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the targets of some pairs, start and end included."""
        return [self.tgt[self.tgt_starts[i] : self.tgt_starts[i + 1]] for i in rows]

    def fingerprint(self) -> str:
        """A hash of all ids: equal corpora under equal tokenizers have equal ones."""
        digest = sha256()
        for array in self:
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


class Counts(NamedTuple):
    """What became of the pairs of a corpus."""

    read: int
    kept: int
    empty: int  # dropped: a side has no token, or nothing but spaces
    too_long: int  # dropped: a side is longer than allowed
    tokens: tuple[int, int]  # of both sides, special ones not counted, in pairs that were kept
    unknown: tuple[int, int]  # of these


class Sides(NamedTuple):
    """How text of both sides becomes ids."""

    src: Tokenizer
    tgt: Tokenizer
    start_id: int  # that decoders begin with
    longest: tuple[int, int]  # tokens of a source and of a target, special ones included


def encode_pairs(pairs: Iterable[tuple[str, str]], sides: Sides, name: str) -> tuple[Encoded, np.ndarray, Counts]:
    """(ids, (P,) the number in the corpus of each pair that was kept, what became of all).

    Raises:
        DataError: no pair is left.
    """
    src, tgt, kept, too_long, empty, read = [], [], [], 0, 0, 0
    pairs = iter(pairs)
    while chunk := list(islice(pairs, _CHUNK)):
        ids = sides.src.encode_sources([pair[0] for pair in chunk]), sides.tgt.encode([pair[1] for pair in chunk])
        for texts, a, b in zip(chunk, *ids, strict=True):
            read += 1
            if len(a) <= sides.src.added or not b or not all(map(str.strip, texts)):  # spaces alone are tokens to some
                empty += 1
            elif len(a) > sides.longest[0] or len(b) + 1 > sides.longest[1]:
                too_long += 1
            else:
                kept.append(read - 1)
                src.append(np.array(a, np.int32))
                tgt.append(np.array([sides.start_id, *b, sides.tgt.eos_id], np.int32))
    if not kept:
        raise DataError(
            f"{name}: no pair is left of {read}: {empty} have an empty side, {too_long} are longer than "
            f"{sides.longest[0]} source or {sides.longest[1]} target tokens"
        )
    encoded = Encoded(*_flat(src), *_flat(tgt))
    added = sides.src.added, 2
    tokens = tuple(len(ids) - n * len(kept) for ids, n in zip((encoded.src, encoded.tgt), added, strict=True))
    unknown = int((encoded.src == sides.src.unk_id).sum()), int((encoded.tgt == sides.tgt.unk_id).sum())
    return encoded, np.array(kept), Counts(read, len(kept), empty, too_long, (tokens[0], tokens[1]), unknown)


def _flat(sentences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in sentences])])
    return np.concatenate(sentences), starts


class Padded(NamedTuple):
    """A batch as it comes from the data; rows that no pair fills are padding."""

    src_tokens: np.ndarray  # (B, S)
    tgt_tokens: np.ndarray  # (B, T)
    labels: np.ndarray  # (B, T)


def pad_rows(encoded: Encoded, rows: Sequence[int] | np.ndarray, bucket: Bucket, pad_id: int) -> Padded:
    """The pairs of the given numbers in a batch of the bucket's shape."""
    empty: list[Ids] = [[]] * (bucket.sentences - len(rows))
    targets = encoded.targets(rows)
    src = pad([*encoded.sources(rows), *empty], pad_id, bucket.src_length)
    tgt = pad([*(ids[:-1] for ids in targets), *empty], pad_id, bucket.tgt_length)
    labels = pad([*(ids[1:] for ids in targets), *empty], pad_id, bucket.tgt_length)
    return Padded(src, tgt, labels)


def _ignore_interrupts(worker: int, workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Batches:
    """All batches of a run in their order; what stands where depends on corpus, shapes and seed alone.

    It is what grain reads from, in this process or in others.
    """

    def __init__(self, encoded: Encoded, buckets: Sequence[Bucket], pad_id: int, seed: int, total: int):
        self.encoded, self.buckets, self.pad_id, self.seed, self.total = encoded, list(buckets), pad_id, seed, total
        self._plan: tuple[int, Plan] | None = None
        self.an_epoch = count_batches(encoded.lengths, self.buckets)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Padded:
        epoch, batch = divmod(int(index), self.an_epoch)
        plan = self.plan(epoch)
        return pad_rows(self.encoded, plan.batches[batch], self.buckets[plan.buckets[batch]], self.pad_id)

    def plan(self, epoch: int) -> Plan:
        """Which pairs stand where in an epoch."""
        found = self._plan  # read once: threads may ask for different epochs
        if found is None or found[0] != epoch:
            found = epoch, plan_epoch(self.encoded.lengths, self.buckets, self.seed, epoch)
            self._plan = found
        return found[1]

    def read(self, start: int, workers: int = 0) -> Generator[Padded, None, None]:
        """The batches from number `start` on, made ahead by threads of this process or by others."""
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # grain reads a flag of its own, which only a main of absl would set
            flags.FLAGS.mark_as_parsed()
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
        dataset = grain.MapDataset.source(self)[start:].to_iter_dataset(options)
        if workers:
            # Ctrl-C reaches every process of a terminal: this one alone answers.
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(workers, per_worker_buffer_size=2), worker_init_fn=_ignore_interrupts
            )
        iterator = iter(dataset)
        try:
            for batch in iterator:
                yield Padded(*(np.array(a) for a in batch))  # a copy: other processes' memory is given back
        finally:
            iterator.close()
