"""Several models of one target vocabulary, which translate and score as one: by the mean of their distributions."""

from collections.abc import Mapping, Sequence
from os import PathLike

import numpy as np

from ..backend.errors import ConfigError
from ..configs.decoding import DecodingConfig
from ..formulas.decoding import together
from ..train.text.glossary import Glossary
from .batches import Rows
from .translator import Framework, Translator


class Ensemble(Translator):
    """Translators as one. Each reads a source with its own tokenizer; targets, attention and settings are the first's.

    Raises:
        ConfigError: there is no model, or two differ in their target vocabularies or special ids.
    """

    def __init__(self, members: Sequence[Translator]):
        together([member.config for member in members], DecodingConfig())
        first, *others = members
        vocabulary = first.tokenizers.tgt.vocabulary()
        for other in others:
            theirs = other.tokenizers.tgt.vocabulary()
            if different := [token for token in vocabulary if theirs.get(token) != vocabulary[token]]:
                example = min(different, key=vocabulary.__getitem__)
                raise ConfigError(
                    f"{first.name} and {other.name}: their target vocabularies differ in {len(different):,} tokens, "
                    f"such as {example!r}; an ensemble needs the same tokens with the same ids"
                )
        super().__init__(first.checkpoint, " + ".join(member.name for member in members), first)
        self._members = tuple(members)

    @property
    def members(self) -> tuple[Translator, ...]:
        """The models."""
        return self._members

    def with_languages(self, source: str | None = None, target: str | None = None) -> "Ensemble":
        """As `Translator.with_languages`, of every model."""
        return Ensemble([member.with_languages(source, target) for member in self.members])

    def with_forced_bos(self, token: str | int) -> "Ensemble":
        """As `Translator.with_forced_bos`, of every model."""
        return Ensemble([member.with_forced_bos(token) for member in self.members])

    def with_glossary(self, terms: Glossary | Mapping[str, str] | str | PathLike[str]) -> "Ensemble":
        """As `Translator.with_glossary`, of every model."""
        return Ensemble([member.with_glossary(terms) for member in self.members])

    def _sources_of(self, texts: Sequence[str], src: np.ndarray) -> list[np.ndarray]:
        """The ids of each model; those of the first are given."""
        rows = Rows([*range(len(texts))], len(texts))
        return [src, *(member._padded(member.source_ids(texts), rows) for member in self.members[1:])]

    def _score(self, framework: Framework, texts: Sequence[str], src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
        """The log of the mean probability of each target token."""
        sources = self._sources_of(texts, src)
        own = [
            Translator._score(member, framework, texts, ids, tgt)
            for member, ids in zip(self.members, sources, strict=True)
        ]
        return np.logaddexp.reduce(own) - np.log(len(own))
