"""A text as sentences, and back: what separates the sentences survives."""

from collections.abc import Sequence
from typing import NamedTuple

from ...train.text.unspaced import UNSPACED


class Document(NamedTuple):
    """The sentences of a text, without the white space around them."""

    sentences: list[str]
    separators: list[str]  # before the first sentence, between two, and after the last

    @classmethod
    def of(cls, text: str, language: str | None) -> "Document":
        """The sentences of each line, by the rules of a language; None: each line is one sentence.

        Source: sentencex, the Wikimedia Foundation's sentence segmenter.
        """
        sentences, separators = [], [""]
        for line in text.splitlines(keepends=True):
            for sentence in [line] if language is None else _segment(line, language):
                content = sentence.strip()
                if not content:
                    separators[-1] += sentence
                    continue
                begin = sentence.index(content)
                separators[-1] += sentence[:begin]
                sentences.append(content)
                separators.append(sentence[begin + len(content) :])
        return cls(sentences, separators)

    def separator(self, i: int, translations: Sequence[str]) -> str:
        """What precedes translation i: a space between sentences if the script has spaces, otherwise nothing.

        Line breaks, and what precedes the first sentence, are those of the text.
        """
        given = self.separators[i]
        if not i or given.strip(" ") or not translations[i - 1] or not translations[i]:
            return given
        return "" if UNSPACED.search(translations[i - 1][-1] + translations[i][0]) else given or " "

    def text(self, translations: Sequence[str]) -> str:
        """The text with a translation of each sentence."""
        return (
            "".join(self.separator(i, translations) + text for i, text in enumerate(translations)) + self.separators[-1]
        )


def _segment(line: str, language: str) -> list[str]:
    """The sentences of a line, with the white space between them."""
    from langcodes import Language
    from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]  of its compiled part

    try:
        code = Language.get(language).language or "en"  # deu_Latn and de_DE are de
    except ValueError:
        code = "en"  # whose rules serve for a language without its own
    segments = segment(code, line)
    return segments if "".join(segments) == line else [line]
