"""Pairs the parameters that values do not identify, as behind a mistake of the port: by shape, order of use and name.

People port a model line by line and keep its names nearly, so what stands at the same place under a similar name is
probably the same. It is an assumption all the same, and is reported as one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from ..capture.trace import Trace
from ..matching.arrangements import Layout
from ..matching.weights import Match, Part
from .guesses import layouts

_NAME = 6.0  # places in the order of use that another name counts as


def assume(
    reference: Trace, candidate: Trace, free: Sequence[str], undecided: Sequence[str], known: Iterable[Layout]
) -> dict[str, Match]:
    """Matches of undecided parameters of the candidate with free ones of the reference.

    `known`: layouts that values showed; the port probably arranges its other arrays in the same way.
    """
    sources, targets = _in_order_of_use(reference, free), _in_order_of_use(candidate, undecided)
    options = {
        (target, source): plain
        for target in targets
        for source in sources
        if (plain := _plain_layouts(_shape(reference, source), _shape(candidate, target)))
    }
    votes = Counter(map(_arrangement, known))
    votes.update(_arrangement(plain[0]) for plain in options.values() if len(plain) == 1)
    ranks = _ranks(targets, candidate), _ranks(sources, reference)
    costs = {
        (target, source): abs(ranks[0][target] - ranks[1][source]) + _NAME * (1 - similarity(target, source))
        for target, source in options
    }
    matches: dict[str, Match] = {}
    used: set[str] = set()
    for target, source in sorted(costs, key=lambda pair: costs[pair]):
        if target not in matches and source not in used:
            plain = options[target, source]
            order = [votes[_arrangement(layout)] for layout in plain]
            layout = plain[order.index(max(order))]
            region = tuple(slice(0, n) for n in _shape(candidate, target))
            matches[target] = Match(target, (Part(region, source, layout),))
            used.add(source)
    return {target: matches[target] for target in targets if target in matches}


def similarity(one: str, other: str) -> float:
    """The share of the words of a name that begin, or continue, a word of another: 1 for `q.kernel` and `q_proj.k`."""
    words = [re.findall(r"[a-z]+|\d+", name.lower()) for name in (one, other)]
    alike = [any(a == b or (a.isalpha() and (a.startswith(b) or b.startswith(a))) for b in words[1]) for a in words[0]]
    return sum(alike) / max(len(alike), 1)


def _shape(trace: Trace, name: str) -> tuple[int, ...]:
    return trace.values[trace.parameters[name]].shape


def _in_order_of_use(trace: Trace, names: Sequence[str]) -> list[str]:
    """Names by the first operation that uses the parameter, without unused ones, which no output could check."""
    first: dict[int, int] = {}
    for i, operation in enumerate(trace.operations):
        for number in operation.inputs:
            first.setdefault(number, i)
    return sorted((n for n in names if trace.parameters[n] in first), key=lambda name: first[trace.parameters[name]])


def _ranks(names: Sequence[str], trace: Trace) -> dict[str, int]:
    """The place of each name among those whose arrays have the same sizes, in any order."""
    counts: Counter[tuple[int, ...]] = Counter()
    ranks = {}
    for name in names:
        sizes = tuple(sorted(_shape(trace, name)))
        ranks[name] = counts[sizes]
        counts[sizes] += 1
    return ranks


def _plain_layouts(source: tuple[int, ...], target: tuple[int, ...]) -> list[Layout]:
    """The arrangements of a whole array without an unusual step, such as a flip."""
    if prod(source) != prod(target) or not prod(source):
        return []
    return [layout for tier, layout, _ in layouts(source, target) if tier == 0]


def _arrangement(layout: Layout) -> tuple[tuple[int, ...], int]:
    """What two layouts of different sizes have in common: the order of the source's axes, and the number of axes."""
    by_stride = sorted(range(len(layout.axes)), key=lambda i: -layout.axes[i][1])
    return tuple(by_stride), len(layout.shape)
