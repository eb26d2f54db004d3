"""Scores of translations: BLEU, chrF and TER of detokenised text by sacreBLEU, and exact match, with signatures."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    metrics, scores = _metrics(tokenize), []
    _check_lengths(translations, references)
    for name, metric in metrics.items():
        result = _computed(
            tokenize, metric.corpus_score, translations, references, n_bootstrap=RESAMPLES if bootstrap else 1
        )
        mean, interval = (result._mean, result._ci) if bootstrap else (None, None)
        scores.append(Score(name, result.score, str(metric.get_signature()), _number(mean), _number(interval)))
    return [*scores, _exact_match(translations, references)]


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
        scores[system].append(_exact_match(translations, references))
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


def _exact_match(translations: Sequence[str], references: Sequence[Sequence[str | None]]) -> Score:
    rows = zip(translations, *references, strict=True)
    equal = sum(row[0].split() in [text.split() for text in row[1:] if text is not None] for row in rows)
    number = len(translations)
    varies = any(text is None for texts in references for text in texts)
    nrefs = f"nrefs:{'var' if varies else len(references)}|" if len(references) > 1 else ""
    return Score("exact match", 100 * equal / number, f"{nrefs}n:{number}|case:mixed|space:no")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
