"""A table and a plot that compare whole trainings in both frameworks.

`python -m benchmarks.training.trajectories PAGE` runs every case, writes the table into the page and the plot beside
it.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.pages import marks, write_table
from parity_tests.support.trajectories import LOSS_BOUND, Outcome, TrajectoryCase, measure, trajectory_cases


def draw(outcomes: list[Outcome], picture: Path) -> None:
    """Plot the losses and their differences in float64 and float32."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    losses, wide, narrow = figure.subplots(3, sharex=True)
    for i, outcome in enumerate(outcomes):
        color = f"C{i}"
        losses.plot(outcome.losses[:, 0], color=color, linewidth=2.5, alpha=0.4, label=outcome.name)
        losses.plot(outcome.losses[:, 1], color=color, linewidth=0.8, linestyle="--")
        for axes, pairs in ((wide, outcome.losses), (narrow, outcome.narrow_losses)):
            axes.semilogy(np.maximum.accumulate(np.abs(np.subtract(*pairs.T))), color=color)
    losses.set(title="loss in float64: Flax (solid) and PyTorch (dashed)", ylabel="nats per token")
    losses.legend(fontsize=8, ncols=2)
    wide.axhline(LOSS_BOUND, color="black", linewidth=0.8, linestyle=":")
    wide.set(title=f"largest difference so far in float64; bound {LOSS_BOUND:g}", ylabel="nats per token")
    narrow.set(title="largest difference so far in float32, full runs; reported only", xlabel="update")
    narrow.set(ylabel="nats per token")
    figure.savefig(picture, dpi=110)


HEADER = ("case", "loss", "switch", "parameters", "after resume", "float32", "verdict")


def as_cells(outcome: Outcome) -> tuple[str, ...]:
    """A row of the table."""
    numbers = (f"{value:.1e}" for value in (outcome.loss, outcome.handover, outcome.parameters))
    ratios = f"{outcome.ratio:.2f}, {outcome.moment_ratio:.2f}"
    return (
        outcome.name,
        *numbers,
        "bit-identical" if outcome.resumed else "NO",
        ratios,
        "equal" if outcome.ok else "DIFFERENT",
    )


def _measure_on_one_thread(case: TrajectoryCase) -> Outcome:
    torch.set_num_threads(1)
    return measure(case)


def main(page: Path) -> int:
    """Run all cases, one per core at a time; write table and plot. Returns 0 if all hold."""
    marks(page, "trajectories")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(_measure_on_one_thread, cases := list(trajectory_cases()))
        progress = {"total": len(cases), "console": Console(stderr=True), "transient": True}
        outcomes = list(track(results, "trainings", **progress))
    write_table(page, "trajectories", HEADER, [as_cells(outcome) for outcome in outcomes])
    draw(outcomes, page.parent / "trajectories.png")
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.training.trajectories PAGE")
    sys.exit(main(Path(sys.argv[1])))
