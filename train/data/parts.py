"""The training pairs and the validation pairs of a corpus, read anew whenever they are iterated over.

What a corpus contains is counted and hashed once, and remembered as long as its files keep their size and time.
"""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ...backend.cache_directory import cache_directory
from ...backend.errors import DataError
from ...configs.data import CorpusConfig
from ...configs.json_text import parse_json
from ...convert.io.atomic_io import replace_file
from ...convert.io.checksums import checksum_of_json
from ..text.corpus import identity_of, read_pairs

_CHUNK = 10_000  # pairs hashed together
_MAX_HELD_OUT = 1000  # pairs, if the config does not set held_out


class Contents(NamedTuple):
    """What a corpus contains."""

    pairs: int
    digest: str  # of all texts
    identity: Any  # of the files, as JSON values


@dataclass(frozen=True)
class Part:
    """Pairs of a corpus: all, those that are held out, or the others; `both_directions`: then the same swapped."""

    corpus: CorpusConfig
    contents: Contents
    name: str  # for messages
    number_held_out: int = 0
    is_held_out: bool = False
    both_directions: bool = False

    def __len__(self) -> int:
        return (1 + self.both_directions) * self.originals

    @property
    def originals(self) -> int:
        """Number of pairs without the swapped ones."""
        return self.number_held_out if self.is_held_out else self.contents.pairs - self.number_held_out

    @property
    def held_out(self) -> np.ndarray:
        """Sorted numbers of the pairs that are held out."""
        return _held_out(self.contents.pairs, self.number_held_out)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        yield from self.texts()
        if self.both_directions:
            # Source: Ding et al. 2021, "Improving Neural Machine Translation by Bidirectional Training", section 2.
            yield from ((target, source) for source, target in self.texts())

    def texts(self) -> Iterator[tuple[str, str]]:
        """The pairs without the swapped ones. Raises: DataError if the corpus has changed since it was counted."""
        pairs, number = iter(read_pairs(self.corpus)), 0
        for held_out in self.held_out.tolist():
            before = islice(pairs, held_out - number)
            if self.is_held_out:
                deque(before, 0)  # skips them
                yield from islice(pairs, 1)
            else:
                yield from before
                next(pairs, None)
            number = held_out + 1
        if not self.is_held_out:
            yield from pairs
        if identity_of(self.corpus) != self.contents.identity:
            raise DataError(f"{self.name}: the files changed while they were read; start again when they are complete")

    def key(self) -> dict[str, Any]:
        """JSON values that determine the pairs."""
        part = "all" if not self.number_held_out else "held out" if self.is_held_out else "not held out"
        return {
            "contents": self.contents.digest,
            "part": [part, self.number_held_out],
            "both_directions": self.both_directions,
        }


def parts_of(corpus: CorpusConfig, both_directions: bool) -> tuple[Part, Part]:
    """(training pairs, validation pairs). Raises: DataError, as `read_pairs`, or if no training pair remains."""
    contents = contents_of(corpus)
    name = corpus.dataset or f"{corpus.src}, {corpus.tgt}"
    if (validation := corpus.validation) is not None:
        valid = Part(validation, contents_of(validation), "validation", both_directions=both_directions)
        return Part(corpus, contents, name, both_directions=both_directions), valid
    number = corpus.held_out or min(_MAX_HELD_OUT, max(1, contents.pairs // 20))
    if number >= contents.pairs:
        raise DataError(
            f"{corpus.dataset or corpus.src}: has {contents.pairs} pairs, of which {number} are held out for "
            "validation; no training pair remains"
        )
    train = Part(corpus, contents, name, number, both_directions=both_directions)
    return train, replace(train, name="validation", is_held_out=True)


@lru_cache(maxsize=4)
def _held_out(pairs: int, number: int) -> np.ndarray:
    """Sorted numbers of the pairs to hold out, whatever the run's seed: all runs have the same validation pairs."""
    order = np.arange(pairs, dtype=np.uint32 if pairs < 2**32 else np.int64)
    if number:
        np.random.default_rng([0, pairs]).shuffle(order)
    return np.sort(order[:number])


def contents_of(corpus: CorpusConfig) -> Contents:
    """Read a corpus, unless its files are known. Raises: DataError, as `read_pairs`."""
    identity = identity_of(corpus)
    path = cache_directory("contents") / f"{checksum_of_json(identity)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = parse_json(path.read_bytes())
        return Contents(int(known["pairs"]), str(known["digest"]), identity)
    pairs, digest, count = iter(read_pairs(corpus)), xxhash.xxh3_128(), 0
    while chunk := list(islice(pairs, _CHUNK)):
        texts = [text for pair in chunk for text in pair]
        digest.update(np.array([len(text) for text in texts]).tobytes())
        digest.update("".join(texts).encode())
        count += len(chunk)
    contents = Contents(count, digest.hexdigest(), identity)
    if identity_of(corpus) == identity:  # otherwise `Part.texts` raises
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"pairs": count, "digest": contents.digest}) + "\n")
    return contents
