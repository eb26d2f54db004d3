"""What gets the numbers of a run while it trains."""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """TensorBoard, SwanLab, a plot, or one of your own: `train(run, directory, trackers=[mine])`."""

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of an update, `training/loss`, or of a validation after it, `validation/loss`."""
        ...

    def flush(self) -> None:
        """Returns when everything logged is stored: a checkpoint that goes on from it follows."""
        ...

    def close(self) -> None:
        """Ends."""
        ...
