"""Damages every kind of file that twinax reads, many times, and writes what came of it into docs/measurements/fuzz.md.

`python -m benchmarks.conversion.fuzzing PAGE COUNT [KIND ...]`: damages each kind COUNT times, and replaces its row as
soon as it ends; the rows of other kinds stay. Files that were neither read nor refused are kept in runs/fuzz; then the
exit status is 1.
"""

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.pages import markdown, marks, read_rows, write_between
from tests.support.fuzzing import Case, Originals, cases_in_worker
from tests.support.fuzzing_subjects import SUBJECTS

NAME = "fuzz"
FINDINGS = Path("runs/fuzz")
_KEPT = 5  # findings per kind whose files are kept
HEADER = ("kind", "damaged", "read", "refused", "findings")


def main(page: Path, count: int, kinds: Sequence[str]) -> int:
    """Damage the kinds, one per core; return the exit status."""
    marks(page, NAME)
    found = 0
    with (
        tempfile.TemporaryDirectory() as os.environ["XDG_CACHE_HOME"],  # `datasets` leaves a lock per file in its cache
        ThreadPoolExecutor(os.cpu_count()) as pool,  # each waits for a process of its own
    ):
        for ended in as_completed([pool.submit(_damage, kind, count) for kind in kinds]):
            kind, outcomes, findings = ended.result()
            numbers = (count, outcomes["read"], outcomes["refused"], len(findings))
            rows = {row[0]: row for row in read_rows(page, NAME)} | {kind: (kind, *(f"{n:,}" for n in numbers))}
            write_between(page, NAME, markdown(HEADER, [rows[name] for name in SUBJECTS if name in rows]))
            found += len(findings)
    return int(found > 0)


def _damage(kind: str, count: int) -> tuple[str, Counter[str], list[Case]]:
    outcomes, findings = Counter[str](), list[Case]()
    for case in cases_in_worker([(kind, number) for number in range(count)]):
        outcomes[case.outcome] += 1
        if case.is_finding:
            findings.append(case)
            _keep(case, len(findings))
    print(f"{kind}: {outcomes['read']:,} read, {outcomes['refused']:,} refused, {len(findings):,} findings", flush=True)
    return kind, outcomes, findings


def _keep(case: Case, number: int) -> None:
    """Print a finding, and keep the first ones."""
    print(f"{case.name}, case {case.number}: {case.damage}: {case.outcome}", flush=True)
    if number <= _KEPT:
        with tempfile.TemporaryDirectory() as folder:
            copy, _ = Originals(Path(folder)).damaged(case.name, case.number)
            kept = FINDINGS / f"{case.name.replace(',', '').replace(' ', '_')}-{case.number}"
            shutil.copytree(copy, kept, dirs_exist_ok=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) < 2 or not arguments[1].isdigit() or not {*arguments[2:]} <= {*SUBJECTS}:
        sys.exit(f"usage: python -m benchmarks.conversion.fuzzing PAGE COUNT [{'|'.join(SUBJECTS)} ...]")
    sys.exit(main(Path(arguments[0]), int(arguments[1]), arguments[2:] or [*SUBJECTS]))
