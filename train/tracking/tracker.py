"""The interface of trackers, which receive the metrics of a run."""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """TensorBoard, SwanLab, a plot, or your own: `train(run, directory, trackers=[tracker])`."""

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an update (`training/loss`, …) or of a validation after it (`validation/loss`, …)."""
        ...

    def flush(self) -> None:
        """Store everything logged so far; called before each checkpoint."""
        ...

    def close(self) -> None:
        """Close the tracker."""
        ...
