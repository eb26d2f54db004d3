"""Scores of translations: BLEU, chrF and TER of detokenised text by sacreBLEU, and exact match, with signatures."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..backend.errors import DataError

RESAMPLES = 1000  # of the bootstrap, sacreBLEU's default


class Score(NamedTuple):
    """A score and its signature, which states how it was computed."""

    name: str
    value: float
    signature: str
    mean: float | None = None  # of the bootstrap's resamples; the interval is around it
    interval: float | None = None  # half the width of the 95 % confidence interval
    p_value: float | None = None  # of the paired bootstrap against the first system

    def stated(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class CorpusScores:
    """The scores of a corpus that is added in parts; of its sentences, the bootstrap alone keeps statistics.

    Raises:
        DataError: as `corpus_scores`.
    """

    def __init__(self, tokenize: str = "13a", bootstrap: bool = False):
        self._tokenize, self._bootstrap = tokenize, bootstrap
        self._metrics = _metrics(tokenize)
        self._statistics: dict[str, list[Any]] = {name: [] for name in self._metrics}
        self._num_refs: set[int] = set()  # of a part; -1 if its sentences differ
        self._matches = _Matches()

    def add(self, translations: Sequence[str], references: Sequence[Sequence[str | None]]) -> None:
        """Add translations with their references, which are given as those of `corpus_scores`."""
        _check_lengths(translations, references)
        for name, metric in self._metrics.items():
            rows = _computed(self._tokenize, metric._extract_corpus_statistics, translations, references)
            self._statistics[name] += rows
            if not self._bootstrap:  # every score is a function of the sums
                self._statistics[name] = [np.sum(self._statistics[name], 0).tolist()]
            self._num_refs.add(metric.num_refs)
        self._matches.add(translations, references)

    def scores(self) -> list[Score]:
        """The scores of all that was added."""
        from sacrebleu.significance import _bootstrap_resample

        scores = []
        for name, metric in self._metrics.items():
            statistics, mean, interval = self._statistics[name], None, None
            result = metric._aggregate_and_compute(statistics)
            if self._bootstrap:
                metric.n_bootstrap = RESAMPLES
                metric.seed, resamples = _bootstrap_resample(statistics, metric, RESAMPLES)
                result.estimate_ci(resamples)
                mean, interval = _number(result._mean), _number(result._ci)
            metric.num_refs = max(self._num_refs) if len(self._num_refs) == 1 else -1
            scores.append(Score(name, result.score, str(metric.get_signature()), mean, interval))
        return [*scores, self._matches.score()]


def corpus_scores(
    translations: Sequence[str],
    references: Sequence[Sequence[str | None]],
    tokenize: str = "13a",
    bootstrap: bool = False,
) -> list[Score]:
    """Cased and lowercased BLEU, chrF, TER, and exact match: the percentage of translations equal to a reference.

    `references`: one or more sets, each with a reference per translation; None where only another set has one.
    `bootstrap` adds intervals.

    Raises:
        DataError: the lists are empty or differ in length, or sacreBLEU lacks the tokenisation.
    Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores"; Koehn 2004, "Statistical Significance Tests for
        Machine Translation Evaluation".
    """
    corpus = CorpusScores(tokenize, bootstrap)
    corpus.add(translations, references)
    return corpus.scores()


def compare_systems(
    systems: Mapping[str, Sequence[str]], references: Sequence[Sequence[str | None]], tokenize: str = "13a"
) -> dict[str, list[Score]]:
    """The scores of each system with intervals, and p-values against the first system, by paired bootstrap.

    Raises:
        DataError: as `corpus_scores`.
    Source: Koehn 2004, "Statistical Significance Tests for Machine Translation Evaluation", in sacreBLEU's version.
    """
    from sacrebleu.significance import PairedTest

    scores: dict[str, list[Score]] = {name: [] for name in systems}
    for translations in systems.values():
        _check_lengths(translations, references)
    for metric_name, metric in _metrics(tokenize).items():
        test = _computed(tokenize, PairedTest, [*systems.items()], {metric_name: metric}, references, "bs")
        signatures, results = _computed(tokenize, test)
        ((name, signature),) = signatures.items()
        baseline = results[name][0]
        for system, result in zip(systems, results[name], strict=True):
            mean, interval, p_value = map(_number, (result.mean, result.ci, result.p_value))
            # sacreBLEU counts only resamples with a larger difference: with none at all, p would be 0.001.
            never_differs = (result.score, mean, interval) == (baseline.score, baseline.mean, baseline.ci)
            p_value = 1.0 if p_value is not None and never_differs else p_value
            scores[system].append(Score(metric_name, result.score, str(signature), mean, interval, p_value))
    for system, translations in systems.items():
        matches = _Matches()
        matches.add(translations, references)
        scores[system].append(matches.score())
    return scores


def _metrics(tokenize: str) -> dict[str, Any]:
    """sacreBLEU's metrics by name. Raises: DataError if it lacks the tokenisation."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if tokenize not in BLEU.TOKENIZERS:
        raise DataError(f"tokenize={tokenize!r}: must be one of {', '.join(BLEU.TOKENIZERS)}")
    bleu, lowercase = (_computed(tokenize, BLEU, lowercase, tokenize=tokenize) for lowercase in (False, True))
    return {"BLEU": bleu, "BLEU, lower case": lowercase, "chrF": CHRF(), "TER": TER()}


def _computed(tokenization: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """What a function of sacreBLEU returns. Raises: DataError, as some tokenisations need further packages or files."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        raise DataError(f"tokenize={tokenization!r}: sacreBLEU failed: {' '.join(str(error).split())[:200]}") from None


def _check_lengths(translations: Sequence[str], references: Sequence[Sequence[str | None]]) -> None:
    for texts in references:
        if not texts or len(translations) != len(texts):
            raise DataError(
                f"{len(translations)} translations and {len(texts)} references: must be equally many, and not 0"
            )


class _Matches:
    """Counts translations that are equal to a reference, whatever the spaces between their words."""

    def __init__(self) -> None:
        self._equal = self._number = self._references = 0
        self._varies = False

    def add(self, translations: Sequence[str], references: Sequence[Sequence[str | None]]) -> None:
        rows = zip(translations, *references, strict=True)
        self._equal += sum(row[0].split() in [text.split() for text in row[1:] if text is not None] for row in rows)
        self._number += len(translations)
        self._varies = self._varies or any(text is None for texts in references for text in texts)
        self._references = len(references)

    def score(self) -> Score:
        nrefs = f"nrefs:{'var' if self._varies else self._references}|" if self._references > 1 else ""
        value = 100 * self._equal / self._number
        return Score("exact match", value, f"{nrefs}n:{self._number}|case:mixed|space:no")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
