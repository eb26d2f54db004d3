"""The metrics of a run: one JSON line per update and per validation, and trackers that receive the same numbers."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...convert.atomic_io import replace_file
from .tracker import Tracker

FILE = "metrics.jsonl"

Record = dict[str, Any]


def read_metrics(directory: Path) -> list[Record]:
    """The records of a run, in order, without a last line that is incomplete."""
    path = directory / FILE
    return list(_complete_lines(path)) if path.is_file() else []


def _complete_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # the process was killed while writing this line
                return


class MetricsLog:
    """The records of a run, in memory and on disk; truncated to `update` on resume: later updates are repeated.

    Of several processes one writes; the others keep the same records in memory.
    """

    def __init__(self, directory: Path, update: int, *, writes: bool = True):
        self.records: list[Record] = [r for r in read_metrics(directory) if r["update"] <= update]
        self.validations = validations(self.records)
        self._trackers: list[Tracker] = []
        path = directory / FILE if writes else Path(os.devnull)
        if writes:
            replace_file(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = path.open("a", encoding="utf-8")

    def add(self, *trackers: Tracker) -> None:
        """Adds trackers, which receive the numbers of every later record."""
        self._trackers += trackers

    def write(self, record: Record) -> None:
        """Adds a record of an update, or of a validation after it."""
        self.records.append(record)
        self.validations |= validations([record])
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if record.get("averaged"):  # a tracker would show it as the last validation
            return
        prefix = "validation/" if "validation" in record else "training/"
        values = record.get("validation", record).items()
        numbers = {prefix + name: v for name, v in values if isinstance(v, int | float) and name != "update"}
        for tracker in self._trackers:
            tracker.log(record["update"], numbers)

    def flush(self) -> None:
        """Writes all records to disk; called before the checkpoint that follows them is saved."""
        self._file.flush()
        if self._file.name != os.devnull:
            os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Closes the file and the trackers."""
        self.flush()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def validations(records: Iterable[Record]) -> dict[int, Mapping[str, Any]]:
    """Validation metrics by update, without those of averaged parameters."""
    return {r["update"]: r["validation"] for r in records if "validation" in r and not r.get("averaged")}


def best_update(metrics: Mapping[int, Mapping[str, Any]], metric: str) -> int | None:
    """The first update with the best metric, `loss` or `bleu`; None if there is no validation."""
    sign = 1 if metric == "loss" else -1
    updates = [update for update in metrics if metric in metrics[update]]
    return min(updates, key=lambda update: sign * metrics[update][metric], default=None)
