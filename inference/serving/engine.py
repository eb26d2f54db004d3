"""What the server computes: translations, scores and attention of sentences, by task."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...configs.decoding import DecodingConfig
from ..minimum_bayes_risk import Utility, rerank
from ..translator import Hypothesis
from .alignment import word_attention
from .directions import Directions


class Task(NamedTuple):
    """What is computed together: one kind of result of one language pair with one beam size."""

    kind: str  # translate, score or attention
    source: str
    target: str
    beam_size: int = 1


class Translated(NamedTuple):
    """The translations of a sentence, best first."""

    hypotheses: list[Hypothesis]
    truncated: bool  # whether the sentence has more tokens than the model reads


class Engine:
    """Computes the items of tasks with the translators of language pairs.

    | task | item | result |
    |---|---|---|
    | translate | sentence, number on which samples depend | `Translated` |
    | score | source, translation | log-probability in nats |
    | attention | source, translation | `word_attention` |
    """

    def __init__(self, directions: Directions, decoding: DecodingConfig, utility: Utility | None = None):
        """`utility`: samples are ranked by it (minimum Bayes risk)."""
        self.directions, self.decoding = directions, decoding
        self._utility: Utility | None = utility

    def compute(self, task: Task, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(index, result) of each item, in any order."""
        yield from getattr(self, f"_{task.kind}")(task, items)

    def _translate(self, task: Task, items: Sequence[tuple[str, int]]) -> Iterator[tuple[int, Translated]]:
        translator = self.directions.translator(task.source, task.target)
        decoding = replace(self.decoding, beam_size=task.beam_size, n_best=task.beam_size)
        sources = translator.sources([text for text, _ in items])
        truncated, numbers = {*sources.too_long}, [number for _, number in items]
        for i, hypotheses in translator.stream(sources, decoding, numbers=numbers):
            ranked = hypotheses if self._utility is None else rerank(hypotheses, self._utility)
            yield i, Translated(ranked, i in truncated)

    def _score(self, task: Task, items: Sequence[tuple[str, str]]) -> Iterator[tuple[int, float]]:
        translator = self.directions.translator(task.source, task.target)
        yield from enumerate(translator.score([q for q, _ in items], [t for _, t in items], place="pair"))

    def _attention(self, task: Task, items: Sequence[tuple[str, str]]) -> Iterator[tuple[int, dict[str, object]]]:
        translator = self.directions.translator(task.source, task.target)
        for i, (source, translation) in enumerate(items):
            yield i, word_attention(source, translation, translator.attention(source, translation))
