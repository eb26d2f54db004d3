"""Words by the rules of spaCy, an optional package: those of a language alone, without a trained pipeline.

A trained pipeline, as `de_core_news_sm` or `en_core_web_sm`, cuts with the rules of its language, which training leaves
as they are: those of `spacy.blank("de")` and `spacy.blank("en")`, in the version of spaCy that it was made with.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

from ...configs.errors import DataError


def has_spacy() -> bool:
    """Whether it is installed."""
    return find_spec("spacy") is not None


def split_words(texts: Iterable[str], language: str) -> Iterator[list[str]]:
    """The tokens of each text; extra whitespace is one of them, but a blank text has none.

    Raises:
        DataError: as `check_language`.
    """
    for words in _tokenizer(language).pipe(texts):
        yield [word.text for word in words] if words.text.strip() else []


def check_language(language: str) -> None:
    """Raises: DataError where spaCy is not installed, or has no such language."""
    _tokenizer(language)


@cache
def _tokenizer(language: str) -> Any:
    if not has_spacy():
        raise DataError(
            f"languages: the words of {language!r} need spaCy, which is not installed: pip install 'twinax[spacy]'"
        )
    try:
        import spacy

        return spacy.blank(language).tokenizer
    except ImportError as error:  # it does not know the language, or that needs a package more
        said = " ".join(str(error).split())[:200]
        raise DataError(f"languages: spaCy cannot cut {language!r} into words: {said}") from None
