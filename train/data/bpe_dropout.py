"""BPE-dropout: another segmentation of every training sentence in every epoch, by merges that are skipped at random.

The library's own dropout has no seed. Here, whether a merge is skipped depends on the seed, the epoch, the pair and the
place in it alone, so that a resumed run reads the same batches.

Source: Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization", algorithm 1.
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...backend.errors import DataError
from ..text.tokenization import FastTokenizer
from ..text.tokenizer import Tokenizer
from .buckets import Bucket
from .dataset import EncodedPairs, concatenate

_CHUNK = 10_000  # sentences segmented together
_NEVER = np.iinfo(np.int64).max  # rank of an impossible merge


class Merges(NamedTuple):
    """The merges of a BPE tokenizer; a pair of ids is one number, left · vocabulary + right."""

    pairs: np.ndarray  # sorted
    ranks: np.ndarray  # of each pair; the lowest is merged first
    merged: np.ndarray  # the id that a pair becomes
    parts: dict[int, tuple[int, int]]  # the pair that became an id
    size: int  # of the vocabulary

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Merges":
        """Those of a tokenizer. Raises: DataError if it is not of BPE."""
        model = json.loads(tokenizer.fast.to_str())["model"] if isinstance(tokenizer, FastTokenizer) else {}
        if model.get("type") != "BPE":
            raise DataError("bpe_dropout: needs a BPE tokenizer; omit it, or train one with --tokenizer.kind bpe")
        vocabulary, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
        size = max(vocabulary.values()) + 1
        if not model["merges"]:
            raise DataError("bpe_dropout: the tokenizer has no merges; train one with a larger --tokenizer.vocab-size")
        if model.get("ignore_merges"):
            raise DataError("bpe_dropout: the tokenizer has words that no merges give (ignore_merges); omit it")
        texts = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
        ids = np.array([[vocabulary[a], vocabulary[b], vocabulary[a + b.removeprefix(prefix)]] for a, b in texts])
        parts = {int(merged): (int(left), int(right)) for left, right, merged in ids[::-1]}
        pairs, ranks = np.unique(ids[:, 0] * size + ids[:, 1], return_index=True)
        return cls(pairs, ranks, ids[ranks, 2], parts, size)

    def characters(self, token: int) -> list[int]:
        """The ids of a token's characters or bytes, before any merge."""
        if token not in self.parts:
            return [token]
        return [character for part in self.parts[token] for character in self.characters(part)]


class Characters(NamedTuple):
    """All sentences of a side before any merge."""

    ids: np.ndarray  # of the characters or bytes of all sentences, one after another
    begins_word: np.ndarray  # whether each is the first of a word; merges stay within a word
    starts: np.ndarray  # first character of each sentence, and the end of the last

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, merges: Merges, texts: Sequence[str], encoded: Sequence[np.ndarray]
    ) -> "Characters":
        """Those of texts, from their ids, which may have special tokens around them."""
        expanded: dict[int, list[int]] = {}
        ids, begins_word = [], []  # of each sentence
        for sentence, starts in zip(encoded, _word_starts(tokenizer, texts, encoded), strict=True):
            characters = [expanded.setdefault(token, merges.characters(token)) for token in sentence.tolist()]
            ids.append(np.array([i for part in characters for i in part], np.int32))
            firsts = zip(characters, starts, strict=True)
            begins_word.append(np.array([start and i == 0 for part, start in firsts for i in range(len(part))], bool))
        all_ids, bounds = concatenate(ids)
        return cls(all_ids, np.concatenate(begins_word), bounds)


def _word_starts(tokenizer: Tokenizer, texts: Sequence[str], encoded: Sequence[np.ndarray]) -> Iterator[list[bool]]:
    """Whether each token begins a word; a special token around the text is a word of its own."""
    assert isinstance(tokenizer, FastTokenizer)  # as its merges were read
    for start in range(0, len(texts), _CHUNK):
        encodings = tokenizer.encodings(texts[start : start + _CHUNK])
        for encoding, sentence in zip(encodings, encoded[start : start + _CHUNK], strict=True):
            numbers, length = encoding.word_ids, len(encoding.ids)
            places = (k for k in range(len(sentence)) if sentence[k : k + length].tolist() == encoding.ids)
            if (before := next(places, None)) is None:
                raise DataError("bpe_dropout: the tokenizer splits a text differently with special tokens; omit it")
            inner = [i == 0 or number is None or number != numbers[i - 1] for i, number in enumerate(numbers)]
            yield [True] * before + inner + [True] * (len(sentence) - length - before)


class BpeDropout:
    """The sentences of a corpus, segmented anew in every epoch; each merge is skipped with probability `rate`.

    Raises:
        DataError: a tokenizer is not of BPE.
    """

    def __init__(
        self,
        tokenizers: tuple[Tokenizer, Tokenizer],
        pairs: Sequence[tuple[str, str]],
        encoded: EncodedPairs,
        rate: float,
        seed: int,
    ):
        self.encoded, self.rate, self.seed = encoded, rate, seed
        indices = range(len(encoded))
        sides = encoded.sources(indices), encoded.targets(indices)
        self._merges = [Merges.of(tokenizer) for tokenizer in tokenizers]
        self._characters = [
            Characters.of(tokenizer, merges, [pair[side] for pair in pairs], ids)
            for side, (tokenizer, merges, ids) in enumerate(zip(tokenizers, self._merges, sides, strict=True))
        ]

    def epoch(self, number: int, buckets: Sequence[Bucket]) -> EncodedPairs:
        """The pairs of an epoch; one that becomes too long for every bucket keeps the segmentation without dropout."""
        sides = [
            segment(characters, merges, self.rate, (self.seed, number, side))
            for side, (characters, merges) in enumerate(zip(self._characters, self._merges, strict=True))
        ]
        pairs = EncodedPairs(*concatenate(sides[0]), *concatenate(sides[1]))
        shapes = np.array([(bucket.src_length, bucket.tgt_length) for bucket in buckets])
        too_long = np.flatnonzero(~(pairs.lengths[:, None] <= shapes).all(-1).any(-1))
        for i, src, tgt in zip(too_long, self.encoded.sources(too_long), self.encoded.targets(too_long), strict=True):
            sides[0][i], sides[1][i] = src, tgt
        return EncodedPairs(*concatenate(sides[0]), *concatenate(sides[1])) if len(too_long) else pairs


def segment(characters: Characters, merges: Merges, rate: float, key: tuple[int, ...]) -> list[np.ndarray]:
    """The ids of each sentence after BPE with dropout; `key` and a sentence's number determine its random numbers."""
    sentences = []
    for first in range(0, len(characters.starts) - 1, _CHUNK):
        starts = characters.starts[first : first + _CHUNK + 1]
        part = slice(starts[0], starts[-1])
        words = np.cumsum(characters.begins_word[part])
        numbers = np.repeat(np.arange(first, first + len(starts) - 1), np.diff(starts))
        places = np.arange(starts[0], starts[-1]) - characters.starts[numbers]
        state = np.zeros(len(places), np.uint64)
        for word in (*key, numbers, places):
            state = _mix(state, np.atleast_1d(word))
        ids, order = _merge(characters.ids[part].astype(np.int64), words, merges, rate, state)
        ends = np.searchsorted(order, starts[1:] - starts[0])
        sentences += np.split(ids.astype(np.int32), ends[:-1])
    return sentences


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
