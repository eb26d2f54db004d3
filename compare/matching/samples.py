"""Both traces on further inputs and with further parameters, on which what was found has to hold too."""

from collections.abc import Sequence
from typing import Protocol

from ..capture.trace import Trace
from .matching import Matches, Values, same_order
from .perturbation import SMOOTH, perturbed, varied_values
from .weights import WeightMap

Sides = tuple[Values, Values]
_LEAST = 0.9  # share of the equal values that have to be equal on other inputs


class _Applicable(Protocol):
    def applied(self, sides: Sides) -> Sides: ...


class Samples:
    """Values of both traces; sample 0 has the inputs and parameters themselves."""

    def __init__(self, traces: tuple[Trace, Trace], weights: WeightMap):
        self.traces, self.weights, self.varied = traces, weights, varied_values(traces, weights)
        self.last: dict[int, tuple[tuple[_Applicable, ...], Sides]] = {}  # of each sample, the last changes

    def after(self, changes: Sequence[_Applicable], sample: int) -> Sides:
        """The values after these changes, each applied to what the ones before lead to."""
        before, sides = self.last.get(sample, ((), None))
        if sides is None or tuple(changes[: len(before)]) != before:
            before, sides = (), self._own(sample)
        for change in changes[len(before) :]:
            sides = change.applied(sides)
        self.last[sample] = tuple(changes), sides
        return sides

    def _own(self, sample: int) -> Sides:
        one, other = map(Values, self.traces)
        if not sample:
            return one, other
        new = (perturbed(trace, varied, sample, SMOOTH) for trace, varied in zip(self.traces, self.varied, strict=True))
        return one.continued(next(new)), other.continued(next(new))

    def are_alike(self, matches: Matches) -> bool:
        """Whether most values that are equal are so on other inputs: a parameter may come from unknown ones."""
        one, other = self.after((), 1)
        equal = [
            any(same_order(one.value(source), other.value(number), matches.bound) for source in sources)
            for number, sources in matches.of_candidate.items()
            if number not in matches.rearranged
        ]
        return sum(equal) >= _LEAST * len(equal)
