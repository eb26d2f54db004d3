"""Pre-tokenization by spaCy, an optional package, with the rules of a language and no trained pipeline.

A trained pipeline such as `de_core_news_sm` or `en_core_web_sm` tokenizes with the rules of its language. Training does
not change them: they are those of `spacy.blank("de")` and `spacy.blank("en")` in the spaCy version of the pipeline.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

from ...backend.errors import DataError


def has_spacy() -> bool:
    """Whether spaCy is installed."""
    return find_spec("spacy") is not None


def split_words(texts: Iterable[str], language: str) -> Iterator[list[str]]:
    """The tokens of each text; extra whitespace is a token, but a blank text has no tokens.

    Raises:
        DataError: as `check_language`.
    """
    for words in _tokenizer(language).pipe(texts):
        yield [word.text for word in words] if words.text.strip() else []


def check_language(language: str) -> None:
    """Raises: DataError if spaCy is not installed or lacks the language."""
    _tokenizer(language)


@cache
def _tokenizer(language: str) -> Any:
    if not has_spacy():
        raise DataError(f"languages={language!r}: needs spaCy, which is not installed: pip install 'twinax[spacy]'")
    try:
        import spacy

        return spacy.blank(language).tokenizer
    except ImportError as error:  # spaCy lacks the language, or the language needs another package
        cause = " ".join(str(error).split())[:200]
        raise DataError(f"languages: spaCy cannot tokenize {language!r}: {cause}") from None
