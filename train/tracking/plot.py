"""A plot of loss and BLEU over a run."""

from collections.abc import Mapping
from pathlib import Path

from .metrics import Record, validations

PLOT = "loss.png"


class PlotTracker:
    """A tracker that redraws the plot after each validation."""

    def __init__(self, records: list[Record], directory: Path):
        self._records, self._path = records, directory / PLOT

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Redraw the plot if the numbers are from a validation."""
        if any(name.startswith("validation/") for name in numbers):
            plot_losses(self._records, self._path)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def plot_losses(records: list[Record], path: Path) -> None:
    """Plot training and validation loss over updates, and BLEU if the run measures it."""
    from matplotlib.figure import Figure

    train = [(r["update"], r["loss"]) for r in records if "loss" in r]
    scores = validations(records)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    stride = max(1, len(train) // 2000)
    axes.plot(*zip(*train[::stride], strict=True), color="0.75", linewidth=0.8, label="training, with smoothing")
    axes.set(xlabel="updates", ylabel="loss in nats per token")
    if scores:
        axes.plot(list(scores), [v["loss"] for v in scores.values()], color="C0", marker="o", ms=3, label="validation")
    bleu = {update: v["bleu"] for update, v in scores.items() if "bleu" in v}
    if bleu:
        right = axes.twinx()
        right.plot(list(bleu), list(bleu.values()), color="C1", marker="s", ms=3, label="validation BLEU")
        right.set_ylabel("BLEU")
        right.set_ylim(0, 1.1 * max(1, *bleu.values()))
    handles = [handle for part in figure.axes for handle in part.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
