"""Which training pairs are dropped for their text: duplicates, equal sides, unequal lengths, another script.

What needs a model, such as the identification of languages, is left to other tools.
"""

from collections.abc import Callable

import numpy as np
import regex
import xxhash

from ...backend.errors import ConfigError
from ...configs.data import CleaningConfig
from ..text.corpus import read_pairs
from .parts import Part

REASONS = ("duplicates", "with equal sides", "of unequal lengths", "in another script")
_GROUPS = 16  # of hashes, which are sorted one group after the other, so that memory stays small


class Cleaning:
    """Decides about the pairs of a part. Raises: ConfigError if a script does not exist."""

    def __init__(self, config: CleaningConfig, part: Part):
        self.config, self._originals = config, part.originals
        names = {"src_script": config.src_script, "tgt_script": config.tgt_script}
        self._shares = [None if name is None else _share_of(name, field) for field, name in names.items()]
        self._duplicate_mask = duplicate_mask(part) if config.duplicates else None

    def reason(self, number: int, pair: tuple[str, str], tokens: tuple[int, int]) -> int | None:
        """Which of REASONS drops a pair, by its number in the part and its tokens; None: it is kept."""
        config = self.config
        if self._duplicate_mask is not None and self._duplicate_mask[number % self._originals]:
            return 0
        if config.identical and pair[0].strip() == pair[1].strip():
            return 1
        if config.max_ratio is not None and max(tokens) > config.max_ratio * min(tokens):
            return 2
        shares = self._shares if number < self._originals else self._shares[::-1]  # the swapped pairs come last
        if any(share is not None and share(text) < 0.5 for share, text in zip(shares, pair, strict=True)):
            return 3
        return None


def duplicate_mask(part: Part) -> np.ndarray:
    """Whether each pair of a part, without swapped ones, is equal to an earlier one, or to one that is held out.

    Pairs are compared by hashes of 64 bits.
    """
    texts = (f"{len(source)}\n{source}{target}" for source, target in read_pairs(part.corpus))
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64, part.contents.pairs)
    held_out_mask, mask = np.zeros(len(hashes), bool), np.zeros(len(hashes), bool)
    held_out_mask[part.held_out] = True
    for group in range(_GROUPS):
        rows = np.flatnonzero(hashes % _GROUPS == group)
        rows = rows[np.lexsort((~held_out_mask[rows], hashes[rows]))]
        mask[rows[1:]] = hashes[rows[1:]] == hashes[rows[:-1]]
    return mask[~held_out_mask]


def _share_of(script: str, field: str) -> Callable[[str], float]:
    """A function that gives the share of a text's letters that are of a script of Unicode; 1 without letters."""
    try:
        letters, own = regex.compile(r"\p{L}"), regex.compile(rf"(?=\p{{L}})\p{{Script={script}}}")
    except regex.error:
        raise ConfigError(
            f"{field}={script!r}: is no script of Unicode; such are Latin, Cyrillic, Greek, Arabic, Han, Devanagari"
        ) from None

    def share(text: str) -> float:
        total = len(letters.findall(text))
        return len(own.findall(text)) / total if total else 1.0

    return share
