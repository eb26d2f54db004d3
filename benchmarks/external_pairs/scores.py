"""What becomes of planted defects: the sample, the score of each, and the tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from rich.console import Console

ERROR = Console(stderr=True)


class _Site(Protocol):
    @property
    def plant(self) -> Callable[[], object | None]: ...


S = TypeVar("S", bound=_Site)


@dataclass(frozen=True)
class Score:
    """What became of one defect."""

    pair: str
    operator: str
    detail: str
    place: str  # line or parameter
    detected: bool
    is_first: bool  # whether the first thing that is named is the planted line or parameter
    is_inside: bool  # whether the first difference has it among its operations
    is_repaired: bool
    is_alone: bool  # whether nothing else is named
    named: str  # what is named first
    seconds: float
    passed: tuple[str, ...]  # criteria that let it through


def by_operator(sites: Sequence[S], operator: Callable[[S], str]) -> dict[str, list[S]]:
    """The sites of each operator."""
    groups: dict[str, list[S]] = {}
    for site in sites:
        groups.setdefault(operator(site), []).append(site)
    return groups


def sample(pairs: Mapping[str, Mapping[str, Sequence[S]]], seed: int, count: int) -> Iterator[tuple[str, S, object]]:
    """(pair, site, what was planted) of defects that have an effect: operators in turn, pairs with the fewest first.

    `pairs`: the sites by operator.
    """
    rng = np.random.default_rng(seed)
    operators = sorted({operator for sites in pairs.values() for operator in sites})
    stock = {
        (name, operator): [sites[i] for i in rng.permutation(len(sites))]
        for name, groups in pairs.items()
        for operator in operators
        if (sites := groups.get(operator, []))
    }
    used: Counter[str] = Counter()
    drawn = 0
    before = -1
    while before < drawn < count:  # until a round draws nothing
        before = drawn
        for operator in [operators[i] for i in rng.permutation(len(operators))]:
            names = [name for name in pairs if (name, operator) in stock]
            order = sorted(names, key=lambda name: (used[name], rng.random()))
            entry = next((e for name in order if (e := _next(name, stock[name, operator])) is not None), None)
            if entry is not None and drawn < count:
                used[entry[0]] += 1
                drawn += 1
                yield entry


def _next(name: str, remaining: list[S]) -> tuple[str, S, object] | None:
    """The next site at which the defect can be planted."""
    while remaining:
        site = remaining.pop()
        try:
            planted = site.plant()
        except (ValueError, IndexError, TypeError, KeyError):
            continue  # the code would raise
        if planted is not None:
            return name, site, planted
    return None


def report(number: int, score: Score, text: str) -> None:
    """Print one line per defect; a miss with its diagnosis."""
    mark = "first" if score.is_first else "inside" if score.is_inside else "MISSED"
    line = f"{number}: {score.pair}: {score.operator} ({score.detail}) at {score.place}: {mark}, {score.seconds:.1f} s"
    ERROR.print(line, markup=False, highlight=False, soft_wrap=True)
    if not score.is_first:
        ERROR.print(f"    {text[:1500]}", markup=False, highlight=False, soft_wrap=True)


def table(
    scores: Sequence[Score], key: Callable[[Score], str], fields: Sequence[str], criteria: Sequence[str]
) -> list[tuple[str, ...]]:
    """Rows of counts by operator or by pair, then of all."""
    groups = by_operator(sorted(scores, key=key), key)
    groups["all"] = list(scores)
    rows = []
    for name, group in groups.items():
        counts = [sum(getattr(score, field) for score in group) for field in fields]
        passed = [sum(criterion in score.passed for score in group) for criterion in criteria]
        rows.append((name, *map(str, (len(group), *counts, *passed))))
    return rows


def misses(samples: Mapping[str, Sequence[Score]]) -> list[tuple[str, ...]]:
    """A row for each defect whose line or parameter is not the first that is named."""
    return [
        (part, score.pair, f"{score.operator} ({score.detail})", score.place, score.named)
        for part, scores in samples.items()
        for score in scores
        if not score.is_first
    ]
