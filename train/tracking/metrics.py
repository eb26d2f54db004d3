"""The metrics of a run: one JSON line per update and per validation, and trackers that receive the same numbers."""

import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...backend.errors import DataError
from ...configs.json_text import parse_json
from ...convert.io.atomic_io import replace_file
from .tracker import Tracker

FILE = "metrics.jsonl"

Record = dict[str, Any]


def read_metrics(directory: Path) -> list[Record]:
    """The records of a run, in order, without damaged lines."""
    return _read(directory / FILE)[0]


def read_validations(directory: Path, updates: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """The validation metrics of these updates of a run; records of updates, which are many more, are not parsed.

    Raises:
        DataError: one is missing, and a line is damaged.
    """
    path = directory / FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    known = validations(_parse([line for line in lines if b'"validation"' in line])[0])
    if not known.keys() >= {*updates} and (damaged := _parse(lines)[1]):
        raise DataError(f"{path}: {_lines(damaged)} cannot be read")
    return {update: known[update] for update in updates if update in known}


def _read(path: Path) -> tuple[list[Record], list[int]]:
    """(records in order, numbers of damaged lines).

    A last line without its end is not damaged: the process was killed while writing it.
    """
    return _parse(path.read_bytes().splitlines(keepends=True) if path.is_file() else [])


def _parse(lines: Sequence[bytes]) -> tuple[list[Record], list[int]]:
    records: list[Record] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, 1):
        record: Any = None
        with suppress(ValueError):
            record = parse_json(line)
        if _is_record(record):
            records.append(record)
        elif line.endswith(b"\n") or number < len(lines):
            damaged.append(number)
    return records, damaged


def _is_record(record: Any) -> bool:
    """Whether a JSON value has the types of a record that are relied on when a run resumes."""
    if not isinstance(record, dict) or type(record.get("update")) is not int:
        return False
    validation, averaged = record.get("validation", {}), record.get("averaged", [])
    numbers = [value for value in (record.get("loss"), *_values(validation)) if value is not None]
    return (
        isinstance(validation, dict)
        and isinstance(averaged, list)
        and all(type(value) in (int, float) for value in numbers)
    )


def _values(validation: Any) -> list[Any]:
    return [validation.get(name) for name in ("loss", "perplexity", "bleu")] if isinstance(validation, dict) else []


class MetricsLog:
    """The records of a run, in memory and on disk; truncated to `update` on resume: later updates are repeated.

    Of several processes one writes; the others keep the same records in memory. Damaged lines are kept in a copy of
    the file, which `say` names.
    """

    def __init__(self, directory: Path, update: int, say: Callable[[str], None], *, writes: bool = True):
        self._path, self._writes = directory / FILE if writes else Path(os.devnull), writes
        records, damaged = _read(directory / FILE)
        if damaged and writes:
            cannot = f"cannot be read and {'are' if damaged[1:] else 'is'} left out"
            say(f"{self._path}: {_lines(damaged)} {cannot}; the file as it was is {_keep_copy(self._path)}")
        self.records: list[Record] = [record for record in records if record["update"] <= update]
        if not damaged and (gap := _gap(self.records, update)) is not None:
            say(f"{self._path}: has no line for {gap}")
        self.validations = validations(self.records)
        self._trackers: list[Tracker] = []
        self._rewrite()

    def _rewrite(self) -> None:
        """Write all records, and open the file for more."""
        if self._writes:
            replace_file(self._path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, *trackers: Tracker) -> None:
        """Add trackers, which receive the numbers of every later record."""
        self._trackers += trackers

    def write(self, record: Record) -> None:
        """Add a record of an update, or of a validation after it, in the order of updates."""
        position = bisect_right(self.records, record["update"], key=lambda record: record["update"])
        self.records.insert(position, record)
        self.validations |= validations([record])
        if position == len(self.records) - 1:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        else:  # a repeated validation
            self._file.close()
            self._rewrite()
        if record.get("averaged"):  # a tracker would show it as the last validation
            return
        prefix = "validation/" if "validation" in record else "training/"
        values = record.get("validation", record).items()
        numbers = {prefix + name: v for name, v in values if isinstance(v, int | float) and name != "update"}
        for tracker in self._trackers:
            tracker.log(record["update"], numbers)

    def flush(self) -> None:
        """Write all records to disk; called before the checkpoint that follows them is saved."""
        self._file.flush()
        if self._writes:
            os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Close the file and the trackers."""
        self.flush()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _lines(numbers: list[int]) -> str:
    """Lines by their numbers, at most three."""
    lines = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if numbers[3:] else "")
    return f"line{'s' if numbers[1:] else ''} {lines}"


def _gap(records: Sequence[Record], last: int) -> str | None:
    """The first update without a record, from that of the first one to `last`, and how many more there are; or None."""
    updates = sorted({record["update"] for record in records if "validation" not in record and record["update"] > 0})
    if not updates or not (missing := last - updates[0] + 1 - len(updates)):
        return None
    first = next(update + 1 for update, later in pairwise((*updates, last + 1)) if later > update + 1)
    more = f" and {missing - 1:,} other{'s' if missing > 2 else ''}" if missing > 1 else ""
    return f"update {first:,}{more}"


def _keep_copy(path: Path) -> Path:
    """Copy a file to a new name beside it, and return that."""
    names = (path.with_name(f"{path.stem}-damaged{ending}{path.suffix}") for ending in ("", *map(str, range(2, 1000))))
    target = next(name for name in names if not name.exists())
    shutil.copy(path, target)
    return target


def validations(records: Iterable[Record]) -> dict[int, Mapping[str, Any]]:
    """Validation metrics by update, without those of averaged parameters."""
    return {r["update"]: r["validation"] for r in records if "validation" in r and not r.get("averaged")}


def best_update(metrics: Mapping[int, Mapping[str, Any]], metric: str) -> int | None:
    """The first update with the best metric, `loss` or `bleu`; None if there is no validation."""
    sign = 1 if metric == "loss" else -1
    updates = [update for update in metrics if metric in metrics[update]]
    return min(updates, key=lambda update: sign * metrics[update][metric], default=None)
