"""A glossary: in a source, its terms are replaced by their target terms, as `<term> TARGET </term>`.

Source: Dinu et al. 2019, "Training Neural Machine Translation to Apply Terminology Constraints", the variant that
replaces the source term; tags mark the terms here, in place of word features.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from os import PathLike, fspath
from typing import NamedTuple

import regex

from ...backend.errors import DataError
from ...convert.io.checksums import checksum_of_json
from .corpus import read_lines
from .tokenizer import Tokenizer
from .unspaced import UNSPACED, UNSPACED_RANGES

TAGS = ("<term>", "</term>")
# A word, or one other character with its marks. Scripts without spaces have no words here, so that a term may begin
# and end at any of their characters.
_SEGMENT = regex.compile(rf"(?V1s)[\w--[{UNSPACED_RANGES}]]+|.\p{{M}}*")
_WITHIN_TAG = re.compile(rf"(?<=<)(?={'|'.join(tag[1:] for tag in TAGS)})")


class Span(NamedTuple):
    """A term in a text."""

    begin: int
    end: int
    target: str  # its target term


class Glossary:
    """Target terms by source term. Terms match whole words exactly; with `lowercase`, in any case.

    Raises:
        DataError: a term is empty or has a tag, or two that differ only in case have different targets.
    """

    def __init__(self, terms: Mapping[str, str], name: str = "the glossary", lowercase: bool = False):
        self.terms = {source.strip(): target.strip() for source, target in terms.items()}
        self.name, self.lowercase = name, lowercase
        self._targets: dict[str, str] = {}
        sizes: dict[str, set[int]] = {}
        for source, target in self.terms.items():
            _check(source, target, name)
            keys = self._keys(_SEGMENT.findall(source))
            if (other := self._targets.setdefault("".join(keys), target)) != target:
                raise DataError(f"{name}: {source!r} has two targets, {other!r} and {target!r}; the model lowercases")
            sizes.setdefault(keys[0], set()).add(len(keys))
        # first segment of terms -> their numbers of segments, the longest first
        self._sizes = {first: sorted(numbers, reverse=True) for first, numbers in sizes.items()}

    @classmethod
    def of(cls, terms: "Glossary | Mapping[str, str] | str | PathLike[str]") -> "Glossary":
        """From terms, or from a UTF-8 file with a source term, a tab and a target term per line.

        Raises:
            DataError: the file cannot be read, or a line is wrong.
        """
        if isinstance(terms, Glossary):
            return terms
        return cls(terms) if isinstance(terms, Mapping) else cls._read(fspath(terms))

    @classmethod
    def _read(cls, path: str) -> "Glossary":
        if path.endswith(".gz"):
            raise DataError(f"{path}: a glossary must be plain text; unpack it")
        terms: dict[str, str] = {}
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip() and "\t" not in line:
                continue
            place, sides = f"{path}, line {number}", [side.strip() for side in line.split("\t")]
            if len(sides) != 2:
                raise DataError(f"{place}: must have a source term, a tab and a target term, not {len(sides) - 1} tabs")
            source, target = sides
            _check(source, target, place)
            if (other := terms.setdefault(source, target)) != target:
                raise DataError(f"{place}: {source!r} has the target {target!r}, and {other!r} before")
        if not terms:
            raise DataError(f"{path}: has no term")
        return cls(terms, path)

    def for_tokenizer(self, tokenizer: Tokenizer) -> "Glossary":
        """The glossary for sources of this tokenizer. Raises: DataError if the tokenizer lacks a tag."""
        if missing := [tag for tag in TAGS if tokenizer.id_of(tag) is None]:
            raise DataError(
                f"{self.name}: the source tokenizer has no token {missing[0]!r}; the model has to be trained with "
                "--corpus.glossary, and with a tokenizer of its own"
            )
        return Glossary(self.terms, self.name, tokenizer.lowercases)

    def digest(self) -> str:
        """A hash of the terms, and of how sources show them."""
        return checksum_of_json([self.terms, self.lowercase, TAGS])

    def spans(self, text: str) -> list[Span]:
        """The terms of a text from left to right, without overlap; at each place the longest."""
        segments = _SEGMENT.findall(text)
        starts, keys = [0, *accumulate(map(len, segments))], self._keys(segments)
        spans, i = [], 0
        while i < len(keys):
            for size in self._sizes.get(keys[i], ()):
                target = self._targets.get("".join(keys[i : i + size]))
                if i + size <= len(keys) and target is not None:
                    spans.append(Span(starts[i], starts[i + size], target))
                    i += size
                    break
            else:
                i += 1
        return spans

    def spans_of_pair(self, source: str, target: str) -> list[Span]:
        """The terms of a source whose target term is in the target."""
        return [span for span in self.spans(source) if self.count(span.target, target)]

    def usage(self, source: str, translation: str) -> tuple[int, int]:
        """(number of terms in a source, for how many of them the translation has the target term)."""
        targets = Counter(span.target for span in self.spans(source))
        return targets.total(), sum(min(n, self.count(target, translation)) for target, n in targets.items())

    def count(self, term: str, text: str) -> int:
        """How often a text has a term, whatever the spaces, which word tokenizers put around punctuation."""
        part, whole = ([k for k in self._keys(_SEGMENT.findall(t)) if not k.isspace()] for t in (term, text))
        return sum(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))

    def _keys(self, segments: list[str]) -> list[str]:
        """The segments as they are compared."""
        return [segment.lower() for segment in segments] if self.lowercase else segments


def _check(source: str, target: str, place: str) -> None:
    """Raises: DataError if a term is empty, or has a tag."""
    for side, term in (("source", source), ("target", target)):
        if not term.strip():
            raise DataError(f"{place}: the {side} term is empty")
        if tag := next((tag for tag in TAGS if tag in term), None):
            raise DataError(f"{place}: the {side} term {term!r} has {tag}, which marks terms")


def annotate(text: str, spans: Iterable[Span]) -> list[str]:
    """A text with target terms in place of its terms, as tags and pieces of text; its own tags are cut in two.

    The space of a term is within its tags, before the target term, as byte-level tokenizers encode a word.
    """
    pieces: list[str] = []
    place = 0
    for begin, end, target in spans:
        inserted = target if UNSPACED.match(target) else f" {target}"
        pieces += [*_cut(text[place:begin].rstrip()), TAGS[0], inserted, TAGS[1]]
        place = end
    return pieces + _cut(text[place:])


def _cut(text: str) -> list[str]:
    """The text in pieces that have no tag, so that none is encoded as one."""
    return [piece for piece in _WITHIN_TAG.split(text) if piece]


def encode_annotated(
    tokenizer: Tokenizer, texts: Sequence[str], spans: Sequence[Sequence[Span]], longest: int
) -> dict[int, list[int]]:
    """Ids by index of the texts that have a term or a tag, with the special tokens of a source, up to `longest` ids."""
    before, after = tokenizer.around
    tag_ids = {tag: number for tag in TAGS if (number := tokenizer.id_of(tag)) is not None}
    annotated = [annotate(text, own) for text, own in zip(texts, spans, strict=True)]
    rows = {i: pieces for i, pieces in enumerate(annotated) if len(pieces) > 1}
    encoded = iter(tokenizer.encode([piece for pieces in rows.values() for piece in pieces if piece not in tag_ids]))
    sentences: dict[int, list[int]] = {}
    for i, pieces in rows.items():
        ids = [number for piece in pieces for number in ([tag_ids[piece]] if piece in tag_ids else next(encoded))]
        if len(before) + len(ids) + len(after) <= longest:
            sentences[i] = [*before, *ids, *after]
    return sentences
