"""Sentence pairs as arrays of ids, and batches of them in the order of the plan.

Letters: P pairs, B rows, S source length, T target length.
"""

import os
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from itertools import islice
from multiprocessing import parent_process, resource_tracker
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...backend.errors import DataError
from ...formulas.padding import Ids, pad
from ..text.tokenizer import Tokenizer
from .buckets import Bucket, Plan, count_batches, introduce_gradually, plan_epoch

if TYPE_CHECKING:
    from .bpe_dropout import BpeDropout

_CHUNK = 10_000  # pairs encoded per call
_AHEAD = 8  # batches to prefetch


class EncodedPairs(NamedTuple):
    """P pairs: the ids of all sentences of a side concatenated, each with its special tokens."""

    src: np.ndarray
    src_starts: np.ndarray  # (P + 1,) start of each sentence, and the end of the last
    tgt: np.ndarray  # start, sentence, end: the decoder reads all but the last token, labels are all but the first
    tgt_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.src_starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(P, 2): number of tokens that the encoder and the decoder read."""
        return np.stack([np.diff(self.src_starts), np.diff(self.tgt_starts) - 1], axis=1)

    def sources(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the sources of these pairs."""
        return [self.src[self.src_starts[i] : self.src_starts[i + 1]] for i in rows]

    def targets(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the targets of these pairs, start and end included."""
        return [self.tgt[self.tgt_starts[i] : self.tgt_starts[i + 1]] for i in rows]

    def fingerprint(self) -> str:
        """A hash of all ids; the same corpus and tokenizers give the same hash."""
        digest = sha256()
        for array in self:
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


class Counts(NamedTuple):
    """Statistics of a corpus: how many pairs were read, kept and dropped, and their tokens."""

    read: int
    kept: int
    empty: int  # dropped: a side has no token, or nothing but spaces
    too_long: int  # dropped: a side is longer than allowed
    tokens: tuple[int, int]  # of source and target in the kept pairs, special tokens not counted
    unknown: tuple[int, int]  # of these, unknown ones


class Sides(NamedTuple):
    """The tokenizers of both sides and the length limits."""

    src: Tokenizer
    tgt: Tokenizer
    first_ids: Sequence[int]  # what the decoder reads before a target: its start, and a language if one is forced
    longest: tuple[int, int]  # tokens of a source and of a target, special ones included


def encode_pairs(pairs: Iterable[tuple[str, str]], sides: Sides, name: str) -> tuple[EncodedPairs, np.ndarray, Counts]:
    """(ids, (P,) index in the corpus of each kept pair, statistics).

    Raises:
        DataError: all pairs were dropped.
    """
    src, tgt, indices = [], [], []
    too_long, empty, total = 0, 0, 0
    pairs = iter(pairs)
    while chunk := list(islice(pairs, _CHUNK)):
        ids = sides.src.encode_sources([pair[0] for pair in chunk]), sides.tgt.encode([pair[1] for pair in chunk])
        for texts, a, b in zip(chunk, *ids, strict=True):
            total += 1
            if len(a) <= sides.src.added or not b or not all(map(str.strip, texts)):  # some tokenizers encode spaces
                empty += 1
            elif len(a) > sides.longest[0] or len(b) + len(sides.first_ids) > sides.longest[1]:
                too_long += 1
            else:
                indices.append(total - 1)
                src.append(np.array(a, np.int32))
                tgt.append(np.array([*sides.first_ids, *b, sides.tgt.eos_id], np.int32))
    if not indices:
        raise DataError(
            f"{name}: all {total} pairs are dropped: {empty} have an empty side, {too_long} are longer than "
            f"{sides.longest[0]} source or {sides.longest[1]} target tokens"
        )
    encoded = EncodedPairs(*concatenate(src), *concatenate(tgt))
    added = sides.src.added, len(sides.first_ids) + 1
    tokens = tuple(len(ids) - n * len(indices) for ids, n in zip((encoded.src, encoded.tgt), added, strict=True))
    unknown = int((encoded.src == sides.src.unk_id).sum()), int((encoded.tgt == sides.tgt.unk_id).sum())
    return encoded, np.array(indices), Counts(total, len(indices), empty, too_long, (tokens[0], tokens[1]), unknown)


def concatenate(sentences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all sentences, start of each sentence and the end of the last)."""
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in sentences])])
    return np.concatenate(sentences), starts


class PaddedBatch(NamedTuple):
    """A batch padded to the shape of its bucket, or rows of it; unused rows are all padding."""

    src_tokens: np.ndarray  # (B, S)
    tgt_tokens: np.ndarray  # (B, T)
    labels: np.ndarray  # (B, T)


class PlannedBatch(NamedTuple):
    """A batch of a run, and its place in the plan."""

    epoch: int
    number: int  # in the epoch
    bucket: int  # index of its shape
    arrays: PaddedBatch


def pad_rows(
    encoded: EncodedPairs,
    pairs: Sequence[int] | np.ndarray,
    bucket: Bucket,
    pad_id: int,
    rows: np.ndarray | None = None,
) -> PaddedBatch:
    """The pairs with these indices as a batch of the bucket's shape; of it the rows with these numbers."""
    rows = np.arange(bucket.sentences) if rows is None else rows
    pairs = np.asarray(pairs)[rows[rows < len(pairs)]]
    empty: list[Ids] = [[]] * (len(rows) - len(pairs))
    targets = encoded.targets(pairs)
    src = pad([*encoded.sources(pairs), *empty], pad_id, bucket.src_length)
    tgt = pad([*(ids[:-1] for ids in targets), *empty], pad_id, bucket.tgt_length)
    labels = pad([*(ids[1:] for ids in targets), *empty], pad_id, bucket.tgt_length)
    return PaddedBatch(src, tgt, labels)


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, and so in the threads and processes that it starts.

    Ctrl-C reaches every process of a terminal, also a worker that is just starting; the parent alone handles it.
    """
    resource_tracker.ensure_running()  # the first worker would start it, and unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize_worker(worker: int, workers: int) -> None:
    """End with the parent, also a killed one: a worker would otherwise wait for room in its queue forever."""
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Batches:
    """All batches of a run in order; they depend on corpus, shapes and seed alone.

    `rows` are the numbers of the rows to read from the batches of each bucket; None: all. With `bpe_dropout`, the
    lengths of an epoch's pairs, and so the number of its batches, are its own. `is_gradual`: in the first epoch, shapes
    begin one after the other.

    It is a grain data source, read in this process or in worker processes.
    """

    def __init__(
        self,
        encoded: EncodedPairs,
        buckets: Sequence[Bucket],
        pad_id: int,
        seed: int,
        total: int,
        rows: Sequence[np.ndarray] | None = None,
        bpe_dropout: "BpeDropout | None" = None,
        is_gradual: bool = False,
    ):
        self.encoded, self.buckets, self.pad_id = encoded, list(buckets), pad_id
        self.seed, self.total = seed, total
        self._rows, self._bpe_dropout, self._is_gradual = rows, bpe_dropout, is_gradual
        self._epochs: dict[int, tuple[EncodedPairs, Plan]] = {}  # the last two: one is trained on, the other prefetched
        self._starts = {0: 0}  # the first batch of epochs
        self.per_epoch = count_batches(encoded.lengths, self.buckets)  # without BPE dropout

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> PlannedBatch:
        epoch, number = self.position(int(index))
        encoded, plan = self._epoch(epoch)
        bucket = plan.buckets[number]
        rows = None if self._rows is None else self._rows[bucket]
        arrays = pad_rows(encoded, plan.batches[number], self.buckets[bucket], self.pad_id, rows)
        return PlannedBatch(epoch, number, bucket, arrays)

    def position(self, index: int) -> tuple[int, int]:
        """(epoch, number in the epoch) of a batch."""
        if self._bpe_dropout is None:
            return divmod(index, self.per_epoch)
        starts = self._starts  # read once, as other threads replace it
        epoch = max(epoch for epoch, start in starts.items() if start <= index)
        while index >= (end := starts[epoch] + len(self.plan(epoch).batches)):
            epoch += 1
            self._starts = starts = {**starts, epoch: end}
        return epoch, index - starts[epoch]

    def resume(self, index: int, epoch: int, number: int) -> None:
        """States the position of a batch, so that earlier epochs need not be segmented to compute it."""
        self._starts = {0: 0, epoch: index - number}

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch."""
        return self._epoch(epoch)[1]

    def pairs(self, epoch: int) -> EncodedPairs:
        """The pairs as an epoch reads them."""
        return self._epoch(epoch)[0]

    def _epoch(self, number: int) -> tuple[EncodedPairs, Plan]:
        epochs = self._epochs  # read once: other threads may replace it
        if number not in epochs:
            encoded = self.encoded
            if self._bpe_dropout is not None:
                encoded = self._bpe_dropout.epoch(number, self.buckets)
            plan = plan_epoch(encoded.lengths, self.buckets, self.seed, number)
            if number == 0 and self._is_gradual:
                plan = introduce_gradually(plan)
            epochs = {**dict([*epochs.items()][-1:]), number: (encoded, plan)}
            self._epochs = epochs
        return epochs[number]

    def read(self, start: int, workers: int = 0) -> Generator[PlannedBatch, None, None]:
        """The batches from number `start` on, prefetched by a thread or by worker processes."""
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # grain reads an absl flag, which otherwise only absl's main parses
            flags.FLAGS.mark_as_parsed()
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
        dataset = grain.MapDataset.source(self)[start:].to_iter_dataset(options)
        if workers:
            # Through pipes, because segments of shared memory outlive a killed process.
            unshared = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, unshared).mp_prefetch(
                grain.MultiprocessingOptions(workers, per_worker_buffer_size=2), worker_init_fn=_initialize_worker
            )
        iterator = iter(dataset)
        try:
            with _ctrl_c_blocked() if workers else nullcontext():
                batch: Any = next(iterator, None)  # starts the workers
            while batch is not None:
                yield batch
                batch = next(iterator, None)
        finally:
            iterator.close()
