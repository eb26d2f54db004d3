"""How good translations are: sacreBLEU's BLEU, chrF and TER of detokenised text, and exact match, with signatures."""

from collections.abc import Sequence
from typing import NamedTuple

from ..configs.errors import DataError


class Score(NamedTuple):
    """A number and how it was made."""

    name: str
    value: float
    signature: str


def corpus_scores(translations: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> list[Score]:
    """BLEU with case and without, chrF and TER of whole texts; exact match, the percentage that is its reference.

    Raises:
        DataError: there is nothing to score, or sacreBLEU has no such tokenisation.
    Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores".
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if not references or len(translations) != len(references):
        raise DataError(f"{len(translations)} translations and {len(references)} references: a score needs one each")
    if tokenize not in BLEU.TOKENIZERS:
        raise DataError(f"tokenize={tokenize!r}: sacreBLEU has {', '.join(BLEU.TOKENIZERS)}")
    try:
        metrics = {
            "BLEU": BLEU(tokenize=tokenize),
            "BLEU, lower case": BLEU(tokenize=tokenize, lowercase=True),
            "chrF": CHRF(),
            "TER": TER(),
        }
        values = {name: metric.corpus_score(translations, [references]).score for name, metric in metrics.items()}
    except Exception as error:  # some tokenisations need packages or files of their own
        raise DataError(f"tokenize={tokenize!r}: sacreBLEU cannot: {' '.join(str(error).split())[:200]}") from None
    found = [Score(name, values[name], str(metric.get_signature())) for name, metric in metrics.items()]
    equal = sum(ours.split() == theirs.split() for ours, theirs in zip(translations, references, strict=True))
    return [*found, Score("exact match", 100 * equal / len(references), f"n:{len(references)}|case:mixed|space:no")]
