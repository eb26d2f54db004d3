"""What a run writes down: a line of JSON an update and a validation, the same for TensorBoard, and the curves."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .swanlab_log import SwanLabLog

FILE, PLOT = "metrics.jsonl", "loss.png"

Record = dict[str, Any]


def read_metrics(directory: Path) -> list[Record]:
    """The records of a run, in their order; a last line that was cut off is left out."""
    path = directory / FILE
    return list(_whole_lines(path)) if path.is_file() else []


def _whole_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # a process was killed while it wrote this
                return


class MetricsLog:
    """Appends records; begins by taking away those of updates after `update`, which will be made again."""

    def __init__(self, directory: Path, update: int, swanlab: SwanLabLog | None = None):
        self.records: list[Record] = [r for r in read_metrics(directory) if r["update"] <= update]
        self.validations = validations(self.records)
        rest = "".join(json.dumps(record) + "\n" for record in self.records)
        temporary = directory / f"{FILE}.tmp"
        temporary.write_text(rest, encoding="utf-8")
        temporary.replace(directory / FILE)
        self._file = (directory / FILE).open("a", encoding="utf-8")
        self._swanlab = swanlab
        self._board = EventFileWriter(str(directory / "tensorboard"))
        if update:  # what was there after it counts no longer
            self._board.add_event(Event(step=update + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: Record) -> None:
        """Adds a record of an update, or of a validation after it."""
        self.records.append(record)
        self.validations |= validations([record])
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if record.get("averaged"):  # it would stand on the last validation
            return
        prefix = "validation/" if "validation" in record else "training/"
        found = record.get("validation", record).items()
        numbers = {prefix + name: v for name, v in found if isinstance(v, int | float) and name != "update"}
        values = [Summary.Value(tag=name, simple_value=v) for name, v in numbers.items()]
        self._board.add_event(Event(wall_time=time.time(), step=record["update"], summary=Summary(value=values)))
        if self._swanlab is not None:
            self._swanlab.write(record["update"], numbers)

    def flush(self) -> None:
        """Returns when all records are on the disk: before a checkpoint that goes on from them is there."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        """Ends both files."""
        self.flush()
        self._file.close()
        self._board.close()
        if self._swanlab is not None:
            self._swanlab.close()


def validations(records: Iterable[Record]) -> dict[int, Mapping[str, Any]]:
    """What validation found after so many updates; that of averaged parameters is not among them."""
    return {r["update"]: r["validation"] for r in records if "validation" in r and not r.get("averaged")}


def best_update(found: Mapping[int, Mapping[str, Any]], metric: str) -> int | None:
    """The first update with the best metric, `loss` or `bleu`; None where nothing was validated."""
    sign, known = 1 if metric == "loss" else -1, [update for update in found if metric in found[update]]
    return min(known, key=lambda update: sign * found[update][metric], default=None)


def plot_losses(records: list[Record], path: Path) -> None:
    """Losses of training and validation over updates, and BLEU where there is some, as a picture."""
    from matplotlib.figure import Figure

    train = [(r["update"], r["loss"]) for r in records if "loss" in r]
    found = validations(records)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    every = max(1, len(train) // 2000)
    axes.plot(*zip(*train[::every], strict=True), color="0.75", linewidth=0.8, label="training, with smoothing")
    axes.set(xlabel="updates", ylabel="loss in nats a token")
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
