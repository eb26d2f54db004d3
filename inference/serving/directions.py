"""The languages that a translator translates from and to, and the translator of a pair of them."""

from functools import lru_cache

from ...backend.errors import DataError
from ...train.text.tokenizer_files import SOURCE_LANGUAGE, TARGET_LANGUAGE
from ..translator import Translator

AUTO = "auto"


class Directions:
    """The language pairs of a translator.

    A model without language tokens has one pair, with the names of `source` and `target`; None: as the tokenizer's
    settings name them, else "source" and "target".
    """

    def __init__(self, translator: Translator, source: str | None = None, target: str | None = None):
        self._translator = translator
        languages = translator.tokenizers.src.languages
        settings = {} if translator.tokenizers.src.files is None else translator.tokenizers.src.files.settings
        source = source or settings.get("source_lang") or settings.get(SOURCE_LANGUAGE) or "source"
        target = target or settings.get("target_lang") or settings.get(TARGET_LANGUAGE) or "target"
        self._role = None if languages is None else languages.role
        self.sources: tuple[str, ...] = (str(source),)
        self.targets: tuple[str, ...] = (str(target),)
        self.source: str | None = str(source)
        self.target: str | None = str(target)
        if languages is not None:
            self.targets, self.target = tuple(languages.tokens), languages.target
            if languages.role != "source_prefix":
                self.sources, self.source = self.targets, languages.source
        self._of = lru_cache(maxsize=64)(self._translator_of)

    def pair(self, source: str | None, target: str | None) -> tuple[str, str]:
        """The pair that a request means; None is the default. Raises: DataError if there is no such pair."""
        if source == AUTO and len(self.sources) > 1:
            raise DataError(
                f"source={AUTO!r}: the model does not detect languages; name the source's, as in /languages"
            )
        source = self.source if source in (None, AUTO) else source
        target = self.target if target is None else target
        for name, code, codes in (("source", source, self.sources), ("target", target, self.targets)):
            if code is None:
                raise DataError(f"{name}: is missing; the model has {_some(codes)}")
            if code not in codes:
                raise DataError(f"{name}={code!r}: the model has no such language; it has {_some(codes)}")
        assert source is not None
        assert target is not None
        return source, target

    def translator(self, source: str, target: str) -> Translator:
        """The translator of a pair. The arrays are shared."""
        return self._of(source, target)

    def _translator_of(self, source: str, target: str) -> Translator:
        if self._role is None:
            return self._translator
        return self._translator.with_languages(source if len(self.sources) > 1 else None, target)


def _some(codes: tuple[str, ...]) -> str:
    return ", ".join(codes[:5]) + f" and {len(codes) - 5} more, as /languages lists them" * (len(codes) > 5)
