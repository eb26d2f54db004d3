"""A difference between two models: the operations where it arises, and the change that repairs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..capture.trace import Operation
from ..matching.uses import USE
from .edits import FLOAT32, Repair


@dataclass(frozen=True)
class Defect:
    """One difference: the operations between the last values that both models have and the first that differ."""

    reference: tuple[Operation, ...]
    candidate: tuple[Operation, ...]
    error: float  # largest difference, relative to the largest number
    repair: Repair | None = None  # a change to the candidate that makes the last value equal
    note: str = ""  # what differs, where it is no operation
    follows: bool = False  # it is the derivative of what another difference changes, so there is nothing to change

    @property
    def rounding(self) -> bool:
        """Whether it is no more than the rounding of a constant, or of a parameter, to float32."""
        if self.repair is None:
            return False
        return self.repair.rounding or (self.error <= FLOAT32 and bool(self.repair.parameter))

    @property
    def lines(self) -> tuple[str, ...]:
        """The candidate's lines: that of the repair, or else all in order of execution; modules if unknown."""
        if self.repair is not None and self.repair.operation is not None:
            return _lines([self.repair.operation])
        return _lines(self.candidate)

    def __str__(self) -> str:
        if self.note:
            return self.note
        own, other = (" and ".join(_lines(side)) for side in (self.candidate, self.reference))
        sides = ([o for o in side if o.name != USE] for side in (self.candidate, self.reference))
        names = [", ".join(dict.fromkeys(o.name for o in side)) for side in sides]
        text = f"{own} ({names[0]}) differs by {self.error:.1g} from {other} ({names[1]})"
        if not names[0]:  # the code has nothing there
            text = f"{own} is not preceded by {names[1]} ({other})"
        if self.repair is None:
            return text
        return text + f"; {'because' if self.rounding else 'equal with'} {' and '.join(self.lines)}: {self.repair}"


def _lines(operations: Sequence[Operation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(operation.line or operation.module for operation in operations))
