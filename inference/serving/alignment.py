"""Attention weights between the words of a source and of a translation, for the page."""

import re
from collections.abc import Sequence

import numpy as np

from ...train.text.unspaced import UNSPACED
from ..translator import Attention

_GAP = 20  # characters that tokens before may lack in the text, because they are unknown or normalized


def word_attention(source: str, translation: str, attention: Attention) -> dict[str, object]:
    """The spans of words on both sides, in characters, and a weight for each pair.

    A word's weight is the sum over the tokens of the source's word, and the mean over those of the translation's.
    Special tokens belong to no word.
    """
    sources, source_tokens = _words(source, attention.sources)
    targets, target_tokens = _words(translation, attention.targets)
    rows = [attention.weights[tokens].mean(0) for tokens in target_tokens]
    weights = [[round(float(row[tokens].sum()), 4) for tokens in source_tokens] for row in rows]
    return {"source": sources, "translation": targets, "weights": weights}


def _words(text: str, tokens: Sequence[str]) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """The spans of the words of a text that have a token, and the indices of each word's tokens.

    Between spaces there is one word; in a script without spaces, one per token.
    """
    spans: list[tuple[int, int]] = []
    members: list[list[int]] = []
    runs = [match.span() for match in re.finditer(r"\S+", text)]
    end = 0
    for i, token in enumerate(tokens):
        content = token.replace("▁", "").strip()
        begin = text.find(content, end) if content else -1
        if begin < 0 or begin - end > _GAP:  # special, or normalized to other characters
            continue
        end = begin + len(content)
        span = (begin, end) if UNSPACED.search(content) else next(run for run in runs if run[0] <= begin < run[1])
        if spans and span[0] < spans[-1][1]:
            members[-1].append(i)
        else:
            spans.append(span)
            members.append([i])
    return spans, [np.array(indices) for indices in members]
