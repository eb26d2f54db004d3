"""Further inputs and parameters for two traces: each number times a factor near 1 that depends on the number alone.

Numbers that are equal on both sides stay equal, in whatever arrangement each side holds them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..capture.trace import Trace
from .weights import WeightMap

Array = np.ndarray
_VARIED = 2**22  # most elements of both models' parameters that change


class Factor(NamedTuple):
    """1 + size · sin(frequency · number + phase), with a phase and up to twice the frequency from a seed."""

    size: float
    frequency: float


REDRAWN = Factor(1e-3, 1e5)  # neighboring numbers get unrelated factors, which redraws the rounding errors
SMOOTH = Factor(5e-2, 15.0)  # numbers that differ by float32's rounding get the same factor, but for 1e-7


def perturbed(trace: Trace, varied: set[int], seed: int, factor: Factor) -> dict[int, Array]:
    """New numbers for these values."""
    random = np.random.default_rng(seed)
    phase, frequency = random.uniform(0, 1e3), factor.frequency * random.uniform(1, 2)
    values = {number: trace.values[number] for number in varied}
    return {n: v * (1 + factor.size * np.sin(frequency * v + phase)) for n, v in values.items()}


def varied_values(traces: tuple[Trace, Trace], weights: WeightMap) -> tuple[set[int], set[int]]:
    """The values that differ from input to input: floating-point inputs and parameters, of a large model its smallest.

    Parameters that are sums or shifted keep their values, because the same factor would not give the same numbers.
    """
    sources = {name: match.sources for name, match in weights.matches.items()} | dict(weights.ambiguous)
    kept = {n for m in weights.matches.values() if m.added_to or m.shift for n in (m.name, *m.sources)}
    kept |= {name for name, several in sources.items() if not kept.isdisjoint(several)}
    names: tuple[set[str], set[str]] = set(), set()
    total = 0
    for group in sorted(_groups(traces, sources, weights.ties), key=lambda group: _size(traces, group)):
        total += _size(traces, group)
        if group[0] and (total <= _VARIED or not names[0]):
            names[0].update(group[0] - kept)
            names[1].update(group[1] - kept)
    numbers = [{t.parameters[n] for n in own & t.parameters.keys()} for t, own in zip(traces, names, strict=True)]
    floating = [
        {n for n in own | set(t.inputs.values()) if t.values.kind(n) == "f"}
        for t, own in zip(traces, numbers, strict=True)
    ]
    return floating[0], floating[1]


def _size(traces: tuple[Trace, Trace], group: tuple[set[str], set[str]]) -> int:
    return sum(t.values.kept(t.parameters[n]).size for t, names in zip(traces, group, strict=True) for n in names)


def _groups(
    traces: tuple[Trace, Trace], sources: Mapping[str, Sequence[str]], ties: Mapping[str, Sequence[str]]
) -> list[tuple[set[str], set[str]]]:
    """(names in the reference, in the candidate) of parameters that share numbers."""
    groups: list[tuple[set[str], set[str]]] = []
    for name in traces[1].parameters:
        own = {name for source in sources.get(name, ()) for name in (source, *ties.get(source, ()))}
        joined = [group for group in groups if not own.isdisjoint(group[0])]
        groups = [group for group in groups if own.isdisjoint(group[0])]
        groups.append((own.union(*(g[0] for g in joined)), {name}.union(*(g[1] for g in joined))))
    return groups
