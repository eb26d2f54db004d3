"""Scores of translations: BLEU, chrF and TER of detokenised text by sacreBLEU, and exact match, with signatures."""

from collections.abc import Sequence
from typing import NamedTuple

from ..configs.errors import DataError


class Score(NamedTuple):
    """A score and its signature, which states how it was computed."""

    name: str
    value: float
    signature: str


def corpus_scores(translations: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> list[Score]:
    """Cased and lowercased BLEU, chrF, TER, and exact match: the percentage of translations equal to their reference.

    Raises:
        DataError: the lists are empty or differ in length, or sacreBLEU lacks the tokenisation.
    Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores".
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if not references or len(translations) != len(references):
        raise DataError(
            f"{len(translations)} translations and {len(references)} references: must be equally many, and not 0"
        )
    if tokenize not in BLEU.TOKENIZERS:
        raise DataError(f"tokenize={tokenize!r}: must be one of {', '.join(BLEU.TOKENIZERS)}")
    try:
        metrics = {
            "BLEU": BLEU(tokenize=tokenize),
            "BLEU, lower case": BLEU(tokenize=tokenize, lowercase=True),
            "chrF": CHRF(),
            "TER": TER(),
        }
        values = {name: metric.corpus_score(translations, [references]).score for name, metric in metrics.items()}
    except Exception as error:  # some tokenisations need further packages or files
        raise DataError(f"tokenize={tokenize!r}: sacreBLEU failed: {' '.join(str(error).split())[:200]}") from None
    scores = [Score(name, values[name], str(metric.get_signature())) for name, metric in metrics.items()]
    equal = sum(
        translation.split() == reference.split()
        for translation, reference in zip(translations, references, strict=True)
    )
    return [*scores, Score("exact match", 100 * equal / len(references), f"n:{len(references)}|case:mixed|space:no")]
