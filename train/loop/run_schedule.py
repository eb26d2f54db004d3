"""Which updates have a checkpoint or a validation, and when a run ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...configs.run import LoopConfig
from ..tracking.metrics import best_update

Validations = Mapping[int, Mapping[str, Any]]  # update -> metrics measured after it


class RunSchedule:
    """The schedule of a run, whose length and validation interval are numbers of updates.

    `validations` is read again on every call because it grows during the run.
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
        """Whether a checkpoint is saved after this update."""
        every = self._loop.checkpoint_every
        return self.validation_due(update) or (bool(every) and update % every == 0)

    def best(self, among: Sequence[int] | None = None) -> int | None:
        """The update with the best validation, among these updates or all."""
        validations = {u: v for u, v in self._validations.items() if among is None or u in among}
        return best_update(validations, self._loop.metric)

    def checkpoints_to_keep(self, updates: Sequence[int]) -> set[int]:
        """The updates whose checkpoints are kept: the last two, in case one is damaged, those to average, the best."""
        validated = [u for u in updates if self.validation_due(u)]
        best = self.best(updates)
        return {*updates[-2:], *validated[-self._loop.average :], *([best] if best is not None else [])}

    def continues(self, update: int) -> bool:
        """Whether another update follows: False after the last one or when patience is exhausted."""
        return update < self.total and not self._out_of_patience()

    def describe_end(self, update: int) -> str:
        """One line on why the run ended."""
        reason = ""
        if update > self.total:
            reason = f", more than the {self.total:,} updates of the config"
        elif update < self.total:
            reason = f": no better metric in {self._loop.patience} validations"
        return f"finished after update {update:,}{reason}; best after update {self.best()}"

    def _out_of_patience(self) -> bool:
        best = self.best()
        if self._loop.patience is None or best is None:
            return False
        return sum(update > best for update in self._validations) >= self._loop.patience
