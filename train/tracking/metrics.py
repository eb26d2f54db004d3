"""The records of a run: one line of JSON per update and per validation, and trackers that get the same numbers."""

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
    """The records of a run, in memory and on the disk; truncated to `update` on resume, since the rest comes again."""

    def __init__(self, directory: Path, update: int):
        self.records: list[Record] = [r for r in read_metrics(directory) if r["update"] <= update]
        self.validations = validations(self.records)
        rest = "".join(json.dumps(record) + "\n" for record in self.records)
        replace_file(directory / FILE, rest)
        self._file = (directory / FILE).open("a", encoding="utf-8")
        self._trackers: list[Tracker] = []

    def add(self, *trackers: Tracker) -> None:
        """Trackers that get the numbers of every record from here on."""
        self._trackers += trackers

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
        for tracker in self._trackers:
            tracker.log(record["update"], numbers)

    def flush(self) -> None:
        """Returns when all records are on the disk: before a checkpoint that goes on from them is there."""
        self._file.flush()
        os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Ends the file and the trackers."""
        self.flush()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def validations(records: Iterable[Record]) -> dict[int, Mapping[str, Any]]:
    """What validation found after so many updates; that of averaged parameters is not among them."""
    return {r["update"]: r["validation"] for r in records if "validation" in r and not r.get("averaged")}


def best_update(found: Mapping[int, Mapping[str, Any]], metric: str) -> int | None:
    """The first update with the best metric, `loss` or `bleu`; None where nothing was validated."""
    sign, known = 1 if metric == "loss" else -1, [update for update in found if metric in found[update]]
    return min(known, key=lambda update: sign * found[update][metric], default=None)
