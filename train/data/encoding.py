"""Sentence pairs to ids: which pairs are dropped, and counts of what was read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...backend.errors import DataError
from ..text.glossary import TAGS, Glossary, encode_annotated
from ..text.tokenizer import Tokenizer
from .dataset import concatenate

_CHUNK = 10_000  # pairs encoded per call
Drop = Callable[[int, tuple[str, str], tuple[int, int]], int | None]


class Counts(NamedTuple):
    """Statistics of a corpus: how many pairs were read, kept and dropped, and their words and tokens."""

    read: int = 0
    kept: int = 0
    empty: int = 0  # dropped: a side has no token, or nothing but spaces
    too_long: int = 0  # dropped: a side is longer than allowed
    tokens: tuple[int, int] = (0, 0)  # of source and target in the kept pairs, special tokens not counted
    unknown: tuple[int, int] = (0, 0)  # of these, unknown ones
    words: tuple[int, int] = (0, 0)  # of source and target in the kept pairs, between spaces
    cleaned: tuple[int, ...] = (0, 0, 0, 0)  # dropped: for each of the reasons of `Cleaning`
    annotated: int = 0  # kept ones whose source has target terms of a glossary

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Counts":
        """From JSON, which has no tuples."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**fields)

    def plus(self, other: "Counts") -> "Counts":
        """The counts of two corpora together."""
        return Counts(*(_add(a, b) for a, b in zip(self, other, strict=True)))


def _add(a: Any, b: Any) -> Any:
    return tuple(map(_add, a, b)) if isinstance(a, Sequence) else a + b


class Sides(NamedTuple):
    """The tokenizers of both sides and the length limits."""

    src: Tokenizer
    tgt: Tokenizer
    first_ids: Sequence[int]  # what the decoder reads before a target: its start, and a language if one is forced
    longest: tuple[int, int]  # tokens of a source and of a target, special ones included
    tag: str | None = None  # token before the text of a source
    glossary: Glossary | None = None  # of which sources are annotated

    @property
    def added(self) -> int:
        """Number of special tokens around a source."""
        return self.src.added + (self.tag is not None)

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text with the special tokens of a source. Raises: DataError if the tokenizer lacks the tag."""
        return self._tagged(self.src.encode_sources(texts))

    def encode_annotated(self, pairs: Sequence[tuple[str, str]], first: int) -> dict[int, list[int]]:
        """Ids by index of the sources with a term whose target term is in the target, if they are not too long.

        Pairs with an odd number stay as they are, so that the model learns to translate without a glossary too; the
        number of the first pair is `first`.
        """
        if self.glossary is None:
            return {}
        spans = [[] if (first + i) % 2 else self.glossary.spans_of_pair(*pair) for i, pair in enumerate(pairs)]
        room = self.longest[0] - (self.tag is not None)
        sentences = encode_annotated(self.src, [source for source, _ in pairs], spans, room)
        return dict(zip(sentences, self._tagged([*sentences.values()]), strict=True))

    def is_annotated(self, ids: Sequence[int]) -> bool:
        """Whether a source has a target term of the glossary."""
        return self.glossary is not None and self.src.id_of(TAGS[0]) in ids

    def _tagged(self, sentences: list[list[int]]) -> list[list[int]]:
        if self.tag is None:
            return sentences
        if (number := self.src.id_of(self.tag)) is None:
            raise DataError(f"tag={self.tag!r}: the tokenizer of sources has no such token; train one, or omit the tag")
        place = len(self.src.around[0])
        return [[*ids[:place], number, *ids[place:]] for ids in sentences]


class EncodedSide(NamedTuple):
    """The sentences of a side, one after another, each with its special tokens."""

    ids: np.ndarray
    starts: np.ndarray  # (P + 1,) start of each sentence, and the end of the last

    def sentences(self) -> list[np.ndarray]:
        """The ids of each sentence."""
        return np.split(self.ids, self.starts[1:-1]) if len(self.starts) > 1 else []


class Encoded(NamedTuple):
    """The kept ones of some pairs."""

    sides: tuple[EncodedSide, EncodedSide]
    texts: list[tuple[str, str]]
    indices: list[int]  # which ones they are
    counts: Counts


def encode_pairs(pairs: Iterable[tuple[str, str]], sides: Sides, drop: Drop | None = None, first: int = 0) -> Encoded:
    """The ids of the pairs that have tokens on both sides, are not too long, and are not dropped.

    `drop` gives which of the reasons of `Cleaning` a pair has, or None, by its number (the first is `first`), its texts
    and its numbers of tokens.
    """
    src, tgt, indices, texts = [], [], [], []
    too_long, empty, total, cleaned, annotated = 0, 0, 0, [0, 0, 0, 0], 0
    for chunk, src_ids, tgt_ids, annotated_ids in _tokenized(iter(pairs), sides, first):
        for i, (pair, a, b) in enumerate(zip(chunk, src_ids, tgt_ids, strict=True)):
            total += 1
            if len(a) <= sides.added or not b or not all(map(str.strip, pair)):  # some tokenizers encode spaces
                empty += 1
            elif len(a) > sides.longest[0] or len(b) + len(sides.first_ids) > sides.longest[1]:
                too_long += 1
            elif drop and (reason := drop(first + total - 1, pair, (len(a) - sides.added, len(b)))) is not None:
                cleaned[reason] += 1
            else:
                indices.append(total - 1)
                texts.append(pair)
                source_ids = annotated_ids.get(i, a)
                annotated += sides.is_annotated(source_ids)
                src.append(np.array(source_ids, np.int32))
                tgt.append(np.array([*sides.first_ids, *b, sides.tgt.eos_id], np.int32))
    encoded = EncodedSide(*concatenate(src)), EncodedSide(*concatenate(tgt))
    added = sides.added, len(sides.first_ids) + 1
    tokens = [len(side.ids) - n * len(indices) for side, n in zip(encoded, added, strict=True)]
    unknown = [int((side.ids == tokenizer.unk_id).sum()) for side, tokenizer in zip(encoded, sides[:2], strict=True)]
    words = [sum(len(pair[side].split()) for pair in texts) for side in (0, 1)]
    kept = total, len(indices), empty, too_long
    counts = Counts(*kept, _two(tokens), _two(unknown), _two(words), tuple(cleaned), annotated)
    return Encoded(encoded, texts, indices, counts)


class _Chunk(NamedTuple):
    """Some pairs with their ids."""

    pairs: list[tuple[str, str]]
    src: list[list[int]]
    tgt: list[list[int]]
    annotated: dict[int, list[int]]  # by index, of sources with target terms


def _tokenized(pairs: Iterator[tuple[str, str]], sides: Sides, first: int) -> Iterator[_Chunk]:
    """The pairs in chunks, the first pair with number `first`; the next chunk is tokenized meanwhile."""

    def tokenize(chunk: list[tuple[str, str]], number: int) -> _Chunk:
        sources, targets = (list(texts) for texts in zip(*chunk, strict=True))
        annotated = sides.encode_annotated(chunk, number)
        return _Chunk(chunk, sides.encode_sources(sources), sides.tgt.encode(targets), annotated)

    with ThreadPoolExecutor(1) as thread:
        ahead = None
        while chunk := list(islice(pairs, _CHUNK)):
            task = thread.submit(tokenize, chunk, first)
            first += len(chunk)
            if ahead is not None:
                yield ahead.result()
            ahead = task
        if ahead is not None:
            yield ahead.result()


def _two(numbers: Sequence[int]) -> tuple[int, int]:
    src, tgt = numbers
    return src, tgt


def check_kept(counts: Counts, sides: Sides, name: str) -> None:
    """Raises: DataError if all pairs were dropped."""
    if not counts.kept:
        cleaned = f", {sum(counts.cleaned)} are cleaned away" if any(counts.cleaned) else ""
        raise DataError(
            f"{name}: all {counts.read} pairs are dropped: {counts.empty} have an empty side, {counts.too_long} are "
            f"longer than {sides.longest[0]} source or {sides.longest[1]} target tokens{cleaned}"
        )
