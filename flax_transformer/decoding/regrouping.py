"""Batches that finished sentences leave, and that unfinished sentences of other batches join.

Batches meet at a few lengths of hypotheses. So they stay full, and no program is compiled for another size. Only where
another program is needed anyway, because the cache is full, few sentences go on in a small batch.

Letters: B sentences, S source length.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ...formulas.sentence_rules import FREE
from ..attention import KeysValues
from ..module import on_host
from .programs import Past, compiled_length
from .state import Search

# A batch pauses when at most this share of its sentences is unfinished.
SHARE = 0.75
# Batches of a thread wait for others as long as they need about this memory together; growing caches are not counted.
WAITING_BYTES = 1 << 30
# At most so many sentences go on in a batch of this size when the cache is full.
SMALL = 8

Finished = tuple[np.ndarray, np.ndarray, np.ndarray]  # places, hypotheses with the start token, their scores


class DecodingBatch(NamedTuple):
    """Sentences whose hypotheses have one length. All arrays but that length are (B, ...)."""

    places: np.ndarray  # of the sentences among those of all batches; -1: the row is not used
    sources: Any  # by model: tokens, and their mask
    memories: list[list[KeysValues]]
    search: Search
    past: Past

    @property
    def used(self) -> np.ndarray:
        """Whether a row is a sentence that is not finished."""
        return self.places >= 0

    @property
    def length(self) -> int:
        """The length of the hypotheses."""
        return int(self.search.length)


# (batch, until, few) -> the batch when all but `few` sentences are finished, or at length `until`
Decode = Callable[[DecodingBatch, int, int], DecodingBatch]


def regrouped(
    groups: Iterable[Iterator[DecodingBatch]], decode: Decode, longest: int, pad_ids: Sequence[int], small: int
) -> Iterator[Finished]:
    """Decode groups of batches of one shape; `pad_ids`: of each model, `small`: size of a small batch."""
    stragglers: list[DecodingBatch] = []
    for batches in groups:
        yield from _group(batches, [], decode, longest, stragglers, small)
    if stragglers:
        yield from _group(iter(()), _alike(stragglers, pad_ids), decode, longest, [], small)


def _group(
    batches: Iterator[DecodingBatch],
    waiting: list[DecodingBatch],
    decode: Decode,
    longest: int,
    stragglers: list[DecodingBatch],
    small: int,
) -> Iterator[Finished]:
    """Decode batches of one shape, and those that wait.

    A batch that has lost a share of its sentences takes over some that wait at its length. If they do not fill it, its
    sentences wait, and another batch begins. After the last one, the shortest goes on. `stragglers` receives those of
    few sentences with a full cache.
    """
    following = next(batches, None)
    while following is not None or waiting:
        may_wait = following is not None and _bytes([*waiting, following]) <= WAITING_BYTES
        if following is not None and (may_wait or not waiting):
            batch, following = following, next(batches, None)
        else:
            batch = waiting.pop(int(np.argmin([other.length for other in waiting])))
        size = len(batch.places)
        while batch.used.any():
            # A batch that is not full would pause at once.
            few = min(int(SHARE * size), size - 1) if may_wait and following is not None else 0
            ends = [other.length for other in waiting if other.length > batch.length]
            full_cache = compiled_length(batch.length + 1, longest)
            batch = decode(batch, longest if few else min([*ends, full_cache]), few)
            ended = on_host(batch.search.settled) | (batch.length == longest)
            if (ended & batch.used).any():
                yield finished(np.where(ended, batch.places, -1), batch.search)
            batch, rest = batch._replace(places=np.where(ended, -1, batch.places)), None
            same = [i for i, other in enumerate(waiting) if other.length == batch.length]
            if same and batch.used.any():
                batch, rest = _merged(batch, waiting.pop(same[0]))
                may_wait |= bool(batch.used.all())
            number = batch.used.sum()
            if rest is not None:
                waiting.append(rest)
            elif 0 < number <= few:
                waiting.append(batch)
                break
            elif not few and 0 < number <= small < size and batch.length == full_cache:
                stragglers.append(_rows(batch, batch, np.flatnonzero(batch.used), small))
                break


def _bytes(batches: list[DecodingBatch]) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(batches))


def finished(places: np.ndarray, search: Search) -> Finished:
    """The hypotheses of the rows that have a place."""
    used = np.flatnonzero(places >= 0)
    return places[used], on_host(search.finished)[used], on_host(search.scores)[used]


def _merged(batch: DecodingBatch, other: DecodingBatch) -> tuple[DecodingBatch, DecodingBatch | None]:
    """(as many sentences of both as fit, the rest)."""
    used, size = np.flatnonzero(np.concatenate([batch.used, other.used])), len(batch.places)
    rest = _rows(batch, other, used[size:], size) if len(used) > size else None
    return _rows(batch, other, used[:size], size), rest


def _rows(batch: DecodingBatch, other: DecodingBatch, indices: np.ndarray, size: int) -> DecodingBatch:
    """A batch of the rows with these indices in both."""
    filled = np.resize(indices, size)
    places = np.concatenate([batch.places, other.places])[filled]
    return DecodingBatch(np.where(np.arange(size) < len(indices), places, -1), *_take(batch[1:], other[1:], filled))


@jax.jit
def _take(first: Any, second: Any, indices: Int[Array, " B"]) -> Any:
    """Rows of two batches, by their index in both; the length of hypotheses is that of both."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b])[indices] if a.ndim else a, first, second)


def _alike(batches: list[DecodingBatch], pad_ids: Sequence[int]) -> list[DecodingBatch]:
    """The batches, padded to one shape of sources and of rules."""
    widths = [max(sources[0].shape[1] for sources in own) for own in zip(*(b.sources for b in batches), strict=True)]
    longest_rules = max(batch.search.rules.shape[1] for batch in batches)

    def padded(batch: DecodingBatch) -> DecodingBatch:
        sources, memories = [], []
        for (src, keep), memory, width, pad_id in zip(batch.sources, batch.memories, widths, pad_ids, strict=True):
            extra = width - src.shape[1]
            sources.append((_pad(src, -1, extra, pad_id), _pad(keep, -1, extra, False)))
            memories.append([KeysValues(_pad(k, -1, extra, 0), _pad(v, -2, extra, 0)) for k, v in memory])
        rules = batch.search.rules
        search = batch.search._replace(rules=_pad(rules, -1, longest_rules - rules.shape[1], FREE))
        return batch._replace(sources=sources, memories=memories, search=search)

    return [padded(batch) for batch in batches]


def _pad(a: jax.Array, axis: int, extra: int, fill: int | bool) -> jax.Array:
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, extra)
    return jnp.pad(a, widths, constant_values=fill) if extra else a
