"""What is due after an update: checkpoints, validation, the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..configs.run import LoopConfig
from .tracking.metrics import best_update

Validations = Mapping[int, Mapping[str, Any]]  # update -> what was measured after it


class Milestones:
    """The plan of a run whose length and validation interval are in updates.

    `validations` is looked at anew each time: it grows while the run goes on.
    """

    def __init__(self, loop: LoopConfig, validations: Validations):
        assert loop.updates is not None
        assert loop.validate_every is not None
        self.total, self._validate_every = loop.updates, loop.validate_every
        self._loop, self._validations = loop, validations

    def validation_due(self, update: int) -> bool:
        """Whether the parameters after this update are validated."""
        return update % self._validate_every == 0 or update == self.total

    def checkpoint_due(self, update: int) -> bool:
        """Whether they are saved."""
        every = self._loop.checkpoint_every
        return self.validation_due(update) or (bool(every) and update % every == 0)

    def best(self, among: Sequence[int] | None = None) -> int | None:
        """The update with the best validation, of these or of all."""
        chosen = {u: v for u, v in self._validations.items() if among is None or u in among}
        return best_update(chosen, self._loop.metric)

    def kept(self, updates: Sequence[int]) -> set[int]:
        """Which checkpoints of these updates stay: the last one, those to average, and the best."""
        validated = [u for u in updates if self.validation_due(u)]
        best = self.best(updates)
        return {*updates[-1:], *validated[-self._loop.average :], *([best] if best is not None else [])}

    def goes_on(self, update: int) -> bool:
        """Whether another update follows: not after the last, nor when patience is exhausted."""
        return update < self.total and not self._out_of_patience()

    def describe_end(self, update: int) -> str:
        """Why the run ended, in a line."""
        why = ""
        if update > self.total:
            why = f": it has more than the {self.total:,} updates that are asked for"
        elif update < self.total:
            why = f", {self._loop.patience} validations without a better one"
        return f"finished after update {update:,}{why}; best after update {self.best()}"

    def _out_of_patience(self) -> bool:
        best = self.best()
        if self._loop.patience is None or best is None:
            return False
        return sum(update > best for update in self._validations) >= self._loop.patience
