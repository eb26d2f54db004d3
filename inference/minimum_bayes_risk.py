"""Minimum-Bayes-risk reranking: of several translations, the one that is most like all of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from ..backend.errors import ConfigError
from .translator import Hypothesis

Utility = Literal["chrf", "bleu"]


def expected_utilities(texts: Sequence[str], utility: Utility = "chrf") -> list[float]:
    """Σ_j u(text_i, text_j) / N of each of N samples: the mean utility, 0 to 100, with every sample as the reference.

    u is sacreBLEU's chrF of a sentence, or its BLEU with effective order.

    Raises:
        ConfigError: there is no such utility.
    Source: Eikema & Aziz 2020, "Is MAP Decoding All You Need?", equation 9.
    """
    measure, counts = _utility(utility), Counter(texts)
    means = {
        text: sum(count * measure(text, reference) for reference, count in counts.items()) / len(texts)
        for text in counts
    }
    return [means[text] for text in texts]


def rerank(samples: Sequence[Hypothesis], utility: Utility = "chrf") -> list[Hypothesis]:
    """The samples of a sentence by descending `expected_utilities`, which become their scores."""
    values = expected_utilities([sample.text for sample in samples], utility)
    ranked = [sample._replace(score=value) for sample, value in zip(samples, values, strict=True)]
    return sorted(ranked, key=lambda sample: -sample.score)


def _utility(name: str) -> Callable[[str, str], float]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if name not in get_args(Utility):
        raise ConfigError(f"utility={name!r}: must be {' or '.join(map(repr, get_args(Utility)))}")
    metric = CHRF() if name == "chrf" else BLEU(effective_order=True)
    return lambda text, reference: metric.sentence_score(text, [reference]).score
