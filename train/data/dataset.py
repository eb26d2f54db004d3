"""Sentence pairs as arrays of ids, and batches of them in the order of the plan.

Letters: P pairs, B rows, S source length, T target length.
"""

import os
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import parent_process, resource_tracker
from threading import Thread
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...formulas.padding import Ids, pad
from .buckets import Bucket, Plan, count_batches, introduce_gradually, plan_epoch

_AHEAD = 8  # batches to prefetch


class Pairs(Protocol):
    """P pairs of sentences, each with its special tokens."""

    @property
    def lengths(self) -> np.ndarray:
        """(P, 2): number of tokens that the encoder and the decoder read."""
        ...

    def sources(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the sources of these pairs."""
        ...

    def targets(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the targets of these pairs: start, sentence, end.

        The decoder reads all but the last token, labels are all but the first.
        """
        ...


class Epochs(Protocol):
    """The pairs of a run, which may be others in every epoch."""

    is_varying: bool  # whether they are

    @property
    def lengths(self) -> np.ndarray:
        """(P, 2): number of tokens that the encoder and the decoder read, of every pair once."""
        ...

    def epoch(self, number: int, buckets: Sequence[Bucket]) -> Pairs:
        """The pairs of an epoch."""
        ...


def concatenate(sentences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all sentences, start of each sentence and the end of the last)."""
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in sentences], dtype=np.int64)])
    return np.concatenate([np.empty(0, np.int32), *sentences]), starts


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
    encoded: Pairs,
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

    `rows` are the numbers of the rows to read from the batches of each bucket; None: all. Where epochs vary, each has a
    number of batches of its own. `is_gradual`: in the first epoch, shapes begin one after the other.

    It is a grain data source, read in this process or in worker processes.
    """

    def __init__(
        self,
        source: Epochs,
        buckets: Sequence[Bucket],
        pad_id: int,
        seed: int,
        total: int,
        rows: Sequence[np.ndarray] | None = None,
        is_gradual: bool = False,
    ):
        self.source, self.buckets, self.pad_id = source, list(buckets), pad_id
        self.seed, self.total = seed, total
        self._rows, self._is_gradual = rows, is_gradual
        self._epochs: dict[int, tuple[Pairs, Plan]] = {}  # the last two: one is trained on, the other prefetched
        self._starts = {0: 0}  # the first batch of epochs
        self.per_epoch = 0  # 0: each epoch has a number of its own
        if not source.is_varying:
            self.per_epoch = count_batches(source.epoch(0, self.buckets).lengths, self.buckets)

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
        if self.per_epoch:
            return divmod(index, self.per_epoch)
        starts = self._starts  # read once, as other threads replace it
        epoch = max(epoch for epoch, start in starts.items() if start <= index)
        while index >= (end := starts[epoch] + len(self.plan(epoch).batches)):
            epoch += 1
            self._starts = starts = {**starts, epoch: end}
        return epoch, index - starts[epoch]

    def resume(self, index: int, epoch: int, number: int) -> None:
        """States the position of a batch, so that earlier epochs need not be planned to compute it."""
        self._starts = {0: 0, epoch: index - number}

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch."""
        return self._epoch(epoch)[1]

    def pairs(self, epoch: int) -> Pairs:
        """The pairs as an epoch reads them."""
        return self._epoch(epoch)[0]

    def _epoch(self, number: int) -> tuple[Pairs, Plan]:
        epochs = self._epochs  # read once: other threads may replace it
        if number not in epochs:
            encoded = self.source.epoch(number, self.buckets)
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
