"""Generated corpora of any size: invented words with Zipf's frequencies, and lengths like those of news text."""

from pathlib import Path

import numpy as np

_ONSETS = ["b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "st", "sch", "kr"]
_VOWELS = ["a", "e", "i", "o", "u", "ei", "an", "en", "er"]
_SYLLABLES = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
_TYPES = 200_000  # different words of a language
_CHUNK = 100_000  # pairs drawn together


def write_corpus(folder: Path, pairs: int) -> None:
    """Write src and tgt, one sentence per line; about 18 words each."""
    rng = np.random.default_rng(0)
    vocabularies = [_words(rng), _words(rng)]
    shares = np.cumsum(1 / np.arange(1, _TYPES + 1))
    with (folder / "src").open("w") as src, (folder / "tgt").open("w") as tgt:
        for start in range(0, pairs, _CHUNK):
            number = min(_CHUNK, pairs - start)
            lengths = np.clip(rng.lognormal(2.9, 0.55, number), 1, 90)
            for file, words in zip((src, tgt), vocabularies, strict=True):
                sizes = np.maximum(1, np.rint(lengths * rng.uniform(0.85, 1.15, number))).astype(int)
                drawn = words[np.searchsorted(shares, rng.random(sizes.sum()) * shares[-1])].tolist()
                ends = np.cumsum(sizes).tolist()
                lines = (" ".join(drawn[a:b]) for a, b in zip([0, *ends], ends, strict=False))
                file.write("\n".join(lines) + "\n")


def _words(rng: np.random.Generator) -> np.ndarray:
    sizes = rng.integers(1, 5, _TYPES)
    return np.array(["".join(rng.choice(_SYLLABLES, size)) for size in sizes], object)
