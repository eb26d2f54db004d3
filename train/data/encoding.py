"""Sentence pairs to ids: which pairs are dropped, and counts of what was read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...backend.errors import DataError
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

    @property
    def added(self) -> int:
        """Number of special tokens around a source."""
        return self.src.added + (self.tag is not None)

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text with the special tokens of a source. Raises: DataError if the tokenizer lacks the tag."""
        sentences = self.src.encode_sources(texts)
        if self.tag is None:
            return sentences
        if (number := self.src.id_of(self.tag)) is None:
            raise DataError(f"tag={self.tag!r}: the tokenizer of sources has no such token; train one, or omit the tag")
        (framed,), (inner,) = self.src.encode_sources(["a"]), self.src.encode(["a"])
        place = next(i for i in range(len(framed)) if framed[i : i + len(inner)] == inner)
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
    too_long, empty, total, cleaned = 0, 0, 0, [0, 0, 0, 0]
    for chunk, ids in _tokenized(iter(pairs), sides):
        for pair, a, b in zip(chunk, *ids, strict=True):
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
                src.append(np.array(a, np.int32))
                tgt.append(np.array([*sides.first_ids, *b, sides.tgt.eos_id], np.int32))
    encoded = EncodedSide(*concatenate(src)), EncodedSide(*concatenate(tgt))
    added = sides.added, len(sides.first_ids) + 1
    tokens = [len(side.ids) - n * len(indices) for side, n in zip(encoded, added, strict=True)]
    unknown = [int((side.ids == tokenizer.unk_id).sum()) for side, tokenizer in zip(encoded, sides[:2], strict=True)]
    words = [sum(len(pair[side].split()) for pair in texts) for side in (0, 1)]
    kept = total, len(indices), empty, too_long
    counts = Counts(*kept, _two(tokens), _two(unknown), _two(words), tuple(cleaned))
    return Encoded(encoded, texts, indices, counts)


def _tokenized(
    pairs: Iterator[tuple[str, str]], sides: Sides
) -> Iterator[tuple[list[tuple[str, str]], tuple[list[list[int]], list[list[int]]]]]:
    """(some pairs, ids of their sides); the next ones are tokenized meanwhile."""

    def tokenize(chunk: list[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
        return sides.encode_sources([pair[0] for pair in chunk]), sides.tgt.encode([pair[1] for pair in chunk])

    with ThreadPoolExecutor(1) as thread:
        ahead = None
        while chunk := list(islice(pairs, _CHUNK)):
            task = chunk, thread.submit(tokenize, chunk)
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = task
        if ahead is not None:
            yield ahead[0], ahead[1].result()


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
