"""The curves of a run as a picture."""

from collections.abc import Mapping
from pathlib import Path

from .metrics import Record, validations

PLOT = "loss.png"


class PlotTracker:
    """Draws the records of a run after each validation."""

    def __init__(self, records: list[Record], directory: Path):
        self._records, self._path = records, directory / PLOT

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Draws everything anew where the numbers are a validation's."""
        if any(name.startswith("validation/") for name in numbers):
            plot_losses(self._records, self._path)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def plot_losses(records: list[Record], path: Path) -> None:
    """Losses of training and validation over updates, and BLEU where there is some, as a picture."""
    from matplotlib.figure import Figure

    train = [(r["update"], r["loss"]) for r in records if "loss" in r]
    found = validations(records)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    every = max(1, len(train) // 2000)
    axes.plot(*zip(*train[::every], strict=True), color="0.75", linewidth=0.8, label="training, with smoothing")
    axes.set(xlabel="updates", ylabel="loss in nats per token")
    if found:
        axes.plot(list(found), [v["loss"] for v in found.values()], color="C0", marker="o", ms=3, label="validation")
    bleu = {update: v["bleu"] for update, v in found.items() if "bleu" in v}
    if bleu:
        right = axes.twinx()
        right.plot(list(bleu), list(bleu.values()), color="C1", marker="s", ms=3, label="BLEU of validation")
        right.set_ylabel("BLEU")
        right.set_ylim(0, 1.1 * max(1, *bleu.values()))
    handles = [handle for part in figure.axes for handle in part.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
