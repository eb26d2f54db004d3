"""BPE-dropout: another segmentation of every training sentence in every epoch, by merges that are skipped at random.

The library's own dropout has no seed. Here, whether a merge is skipped depends on the seed, the epoch, the pair and the
place in it alone, so that a resumed run reads the same batches.

Source: Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization", algorithm 1.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...backend.errors import DataError
from ..text.tokenization import FastTokenizer
from ..text.tokenizer import Tokenizer
from .buckets import Bucket
from .dataset import concatenate
from .encoding import Counts
from .store import StoredPairs

_CHUNK = 10_000  # sentences segmented together
_NO_BPE = "bpe_dropout: needs a BPE tokenizer; omit it, or train one with --tokenizer.kind bpe"
_NEVER = np.iinfo(np.int64).max  # rank of an impossible merge


class Merges(NamedTuple):
    """The merges of a BPE tokenizer; a pair of ids is one number, left · vocabulary + right."""

    pairs: np.ndarray  # sorted
    ranks: np.ndarray  # of each pair; the lowest is merged first
    merged: np.ndarray  # the id that a pair becomes
    characters: np.ndarray  # the ids of the characters or bytes of each id before any merge, one id after another
    firsts: np.ndarray  # place of the first character of each id
    sizes: np.ndarray  # number of characters of each id
    size: int  # of the vocabulary

    @classmethod
    def of(cls, tokenizer: Tokenizer, largest_id: int = 0) -> "Merges":
        """Those of a tokenizer, for ids up to a largest one. Raises: DataError if it is not of BPE."""
        model = json.loads(tokenizer.fast.to_str())["model"] if isinstance(tokenizer, FastTokenizer) else {}
        if model.get("type") != "BPE":
            raise DataError(_NO_BPE)
        vocabulary, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
        size = max(largest_id, *vocabulary.values(), *tokenizer.vocabulary().values()) + 1
        if not model["merges"]:
            raise DataError("bpe_dropout: the tokenizer has no merges; train one with a larger --tokenizer.vocab-size")
        if model.get("ignore_merges"):
            raise DataError("bpe_dropout: the tokenizer has words that no merges give (ignore_merges); omit it")
        texts = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
        ids = np.array([[vocabulary[a], vocabulary[b], vocabulary[a + b.removeprefix(prefix)]] for a, b in texts])
        characters = _characters(ids, size)
        sizes = np.array([len(part) for part in characters])
        pairs, ranks = np.unique(ids[:, 0] * size + ids[:, 1], return_index=True)
        flat = np.array([i for part in characters for i in part], np.int32)
        return cls(pairs, ranks, ids[ranks, 2], flat, np.cumsum(sizes) - sizes, sizes, size)


def _characters(merges: np.ndarray, size: int) -> list[list[int]]:
    """The characters of each id; of several merges that give an id, the first one counts."""
    parts = {merged: (left, right) for left, right, merged in merges[::-1].tolist()}
    characters: dict[int, list[int]] = {}

    def expand(token: int) -> list[int]:
        if token not in characters:
            characters[token] = [i for part in parts[token] for i in expand(part)] if token in parts else [token]
        return characters[token]

    return [expand(token) for token in range(size)]


class Characters(NamedTuple):
    """Some sentences of a side before any merge."""

    ids: np.ndarray  # of the characters or bytes of all sentences, one after another
    begins_word: np.ndarray  # whether each is the first of a word; merges stay within a word
    starts: np.ndarray  # first character of each sentence, and the end of the last

    @classmethod
    def of(cls, merges: Merges, sentences: Sequence[tuple[np.ndarray, np.ndarray]]) -> "Characters":
        """Those of sentences, each as (ids, whether each id begins a word)."""
        tokens, bounds = concatenate([ids for ids, _ in sentences])
        begins_word, _ = concatenate([starts for _, starts in sentences])
        sizes = merges.sizes[tokens]
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)  # of each character within its token
        ids = merges.characters[np.repeat(merges.firsts[tokens], sizes) + places]
        return cls(ids, np.repeat(begins_word, sizes).astype(bool) & (places == 0), np.concatenate([[0], ends])[bounds])


def word_starts(tokenizer: Tokenizer, texts: Sequence[str], encoded: Sequence[np.ndarray]) -> np.ndarray:
    """For all ids of these texts, whether each begins a word; a special token around a text is a word of its own.

    Raises:
        DataError: the tokenizer is not of BPE, or segments a text differently with special tokens.
    """
    if not isinstance(tokenizer, FastTokenizer):
        raise DataError(_NO_BPE)
    begins_word: list[bool] = []
    for encoding, sentence in zip(tokenizer.encodings(texts), encoded, strict=True):
        numbers, length = encoding.word_ids, len(encoding.ids)
        places = (k for k in range(len(sentence)) if sentence[k : k + length].tolist() == encoding.ids)
        if (before := next(places, None)) is None:
            raise DataError("bpe_dropout: the tokenizer splits a text differently with special tokens; omit it")
        begins_word += [True] * before
        begins_word += [i == 0 or number is None or number != numbers[i - 1] for i, number in enumerate(numbers)]
        begins_word += [True] * (len(sentence) - length - before)
    return np.array(begins_word, np.uint8)


class BpeDropout:
    """The sentences of a corpus, segmented anew in every epoch; each merge is skipped with probability `rate`.

    Raises:
        DataError: a tokenizer is not of BPE, or the store does not know which ids begin a word.
    """

    is_varying = True

    def __init__(self, tokenizers: tuple[Tokenizer, Tokenizer], encoded: StoredPairs, rate: float, seed: int):
        self.encoded, self.rate, self.seed = encoded, rate, seed
        self.merges = [Merges.of(*side) for side in zip(tokenizers, encoded.largest_ids, strict=True)]
        if not encoded.has_word_starts:
            raise DataError(
                f"bpe_dropout={rate}: {encoded.folder} was prepared without it; prepare it again, or omit it"
            )

    @property
    def counts(self) -> Counts:
        """What was read, kept and dropped."""
        return self.encoded.counts

    @property
    def lengths(self) -> np.ndarray:
        """(P, 2): number of tokens that the encoder and the decoder read, without dropout."""
        return self.encoded.lengths

    def fingerprint(self) -> str:
        """A hash of all ids without dropout."""
        return self.encoded.fingerprint()

    def epoch(self, number: int, buckets: Sequence[Bucket]) -> "SegmentedPairs":
        """The pairs of an epoch; one that becomes too long for every bucket keeps the segmentation without dropout."""
        return SegmentedPairs(self, number, buckets)

    def segment(self, rows: np.ndarray, side: int, epoch: int) -> list[np.ndarray]:
        """The ids of the sentences of these pairs in an epoch."""
        characters = Characters.of(self.merges[side], self.encoded.word_starts(rows, side))
        return segment(characters, rows, self.merges[side], self.rate, (self.seed, epoch, side))


def check_merges(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """Raises: DataError if a tokenizer is not of BPE."""
    for tokenizer in tokenizers:
        Merges.of(tokenizer)


class SegmentedPairs:
    """The pairs of an epoch. Only their lengths are kept; a sentence is segmented again whenever it is read."""

    def __init__(self, dropout: BpeDropout, epoch: int, buckets: Sequence[Bucket]):
        self._dropout, self._epoch = dropout, epoch
        shapes = np.array([(bucket.src_length, bucket.tgt_length) for bucket in buckets])
        self.lengths = dropout.encoded.lengths.astype(np.uint16 if shapes.max() < 2**16 else np.int32)
        self._keep_mask = np.zeros(len(self.lengths), bool)  # of pairs that are segmented without dropout
        for first in range(0, len(self.lengths), _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, len(self.lengths)))
            sides = [[len(ids) for ids in dropout.segment(rows, side, epoch)] for side in (0, 1)]
            lengths = np.stack([sides[0], np.array(sides[1]) - 1], axis=1)
            fits = (lengths[:, None] <= shapes).all(-1).any(-1)
            self.lengths[rows[fits]] = lengths[fits]
            self._keep_mask[rows] = ~fits

    def __len__(self) -> int:
        return len(self.lengths)

    def sources(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the sources of these pairs."""
        return self._sentences(rows, 0, self._dropout.encoded.sources)

    def targets(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the targets of these pairs, start and end included."""
        return self._sentences(rows, 1, self._dropout.encoded.targets)

    def _sentences(
        self, rows: Iterable[int], side: int, encoded: Callable[[np.ndarray], list[np.ndarray]]
    ) -> list[np.ndarray]:
        numbers = np.fromiter(rows, np.int64)
        sentences = self._dropout.segment(numbers, side, self._epoch) if len(numbers) else []
        kept = np.flatnonzero(self._keep_mask[numbers])
        for i, ids in zip(kept.tolist(), encoded(numbers[kept]), strict=True):
            sentences[i] = ids
        return sentences


def segment(
    characters: Characters, numbers: np.ndarray, merges: Merges, rate: float, key: tuple[int, ...]
) -> list[np.ndarray]:
    """The ids of each sentence after BPE with dropout; `key` and a sentence's number determine its random numbers."""
    starts = characters.starts
    words = np.cumsum(characters.begins_word)
    sentences = np.repeat(np.arange(len(numbers)), np.diff(starts))
    places = np.arange(starts[-1]) - starts[sentences]
    state = np.zeros(len(places), np.uint64)
    for word in (*key, numbers[sentences], places):
        state = _mix(state, np.atleast_1d(word))
    ids, order = _merge(characters.ids.astype(np.int64), words, merges, rate, state)
    ends = np.searchsorted(order, starts[1:])
    return np.split(ids.astype(np.int32), ends[:-1])


def _merge(
    ids: np.ndarray, words: np.ndarray, merges: Merges, rate: float, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(ids after the merges, number of the first character of each).

    In each round, every possible merge is skipped with probability `rate`. Of the others, each word makes the one of
    the lowest rank, the leftmost of several. A word without one is finished.
    """
    order, finished, rounds = np.arange(len(ids)), [], 0
    while len(ids):
        ranks, merged = _possible_merges(merges, ids, words)
        keep_mask = _mix(state[order], np.atleast_1d(rounds)) >> np.uint64(11) >= np.uint64(rate * 2**53)
        priorities = np.where(keep_mask & (ranks < _NEVER), ranks * len(ids) + np.arange(len(ids)), _NEVER)
        starts = np.flatnonzero(np.diff(words, prepend=words[0] - 1))
        best = np.minimum.reduceat(priorities, starts)
        active_mask = np.repeat(best < _NEVER, np.diff(starts, append=len(ids)))
        finished.append((ids[~active_mask], order[~active_mask]))
        left = best[best < _NEVER] % len(ids)
        ids[left] = merged[left]
        active_mask[left + 1] = False
        ids, order, words = ids[active_mask], order[active_mask], words[active_mask]
        rounds += 1
    all_ids, all_order = (np.concatenate(arrays) for arrays in zip(*finished, strict=True))
    by_place = np.argsort(all_order)
    return all_ids[by_place], all_order[by_place]


def _possible_merges(merges: Merges, ids: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rank of the merge of each symbol and the next one, or `_NEVER`, the id that it gives)."""
    pairs = ids * merges.size + np.append(ids[1:], 0)
    index = np.minimum(np.searchsorted(merges.pairs, pairs), len(merges.pairs) - 1)
    possible = (merges.pairs[index] == pairs) & np.append(words[1:] == words[:-1], False)
    return np.where(possible, merges.ranks[index], _NEVER), merges.merged[index]


def _mix(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    """The 64-bit state after absorbing a number. Source: Steele et al. 2014, SplitMix64."""
    z = state + (word.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
