"""The way back from a loss that is not finite: the last healthy checkpoint, and the command that starts from it."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan, sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from ...configs.run import RunConfig

_WINDOW, _LAST = 100, 10  # updates before a checkpoint, and the last of them, whose mean losses describe it
_NEAR = 1.1  # a loss of at most this times the best one is healthy


def recovery_hint(
    directory: Path, run: RunConfig, records: Iterable[Mapping[str, Any]], checkpoints: Iterable[int]
) -> str:
    """One sentence on how to continue with half the learning rate.

    `checkpoints` are the updates of the checkpoints in the run directory, `records` those of its metrics.
    """
    rate = f"{run.training.learning_rate / 2:g}"
    update = last_healthy(records, checkpoints)
    if update is None:
        return (
            "No checkpoint with recorded losses exists: start a new run with a smaller learning rate "
            f"(--training.learning-rate {rate}), a longer warm-up or --training.clip-norm"
        )
    words = ("twinax", "train", str(directory), "--init-from", str(directory / "checkpoints" / str(update)))
    new = ("--training.learning-rate", rate, "--out", f"{directory}-half-rate")
    return f"The last healthy checkpoint is that of update {update:,}; to start from it: {shlex.join((*words, *new))}"


def last_healthy(records: Iterable[Mapping[str, Any]], checkpoints: Iterable[int]) -> int | None:
    """The last checkpoint before which the mean training loss was near that of the best one; None if there is none.

    Those before which the last losses rise do not count.
    """
    losses = {r["update"]: r["loss"] for r in records if isfinite(r.get("loss", nan))}
    windows = {u: [loss for n, loss in losses.items() if u - _WINDOW < n <= u] for u in checkpoints}
    means = {update: fmean(window) for update, window in windows.items() if window and not _rises(window)}
    return max((u for u, mean in means.items() if mean <= _NEAR * min(means.values())), default=None)


def _rises(losses: Sequence[float]) -> bool:
    """Whether the mean of the last losses is above that of all, by more than their noise explains."""
    steps = [later - loss for loss, later in pairwise(losses[:-_LAST])]
    noise = pstdev(steps) / sqrt(2 * _LAST) if steps else 0.0  # a step has the noise of two losses
    return fmean(losses[-_LAST:]) > _NEAR * fmean(losses) + 3 * noise
