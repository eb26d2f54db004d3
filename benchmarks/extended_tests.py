"""Lists the test cases that `make test` leaves out and CI runs: `make extended-tests`.

`python -m benchmarks.extended_tests LIST REPORT PAGE`: REPORT is pytest's, in JUnit's format, of all cases that are not
slow; PAGE has the tests that catch the planted mistakes. A case is extended if it takes more than a quarter of a
second, catches no mistake, and is not the quickest of a test of which no case catches one. `KEPT` are not extended:
whole runs of their kind, and what a change of code anywhere may break.
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.pages import read_rows, write_atomically

SECONDS = 0.25
KEPT = (
    "parity_tests/mutations/test_mutations.py::test_every_mutation_applies",
    "tests/cli/test_demo.py::test_a_short_demo",
    "tests/project/test_structure.py",
    "tests/train/test_kills.py",
    "tests/train/test_partitioning.py::test_eight_devices_are_one",
    "tests/train/test_processes.py::test_two_processes_are_one",
)


def extended(seconds: Mapping[str, float], catching: Collection[str]) -> list[str]:
    """The extended cases, of the seconds of each case and the cases that catch a mistake."""
    cases_of: dict[str, list[str]] = defaultdict(list)
    for case in sorted(seconds, key=lambda case: (seconds[case], case)):
        cases_of[case.partition("[")[0]].append(case)
    staying = {*catching}
    staying |= {cases[0] for cases in cases_of.values() if len(cases) > 1 and staying.isdisjoint(cases)}
    return sorted(
        case for case, time in seconds.items() if time > SECONDS and case not in staying and not case.startswith(KEPT)
    )


def times(report: Path) -> dict[str, float]:
    """Seconds of each case of a report, by its name in pytest."""
    cases = ET.parse(report).iter("testcase")
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in cases
    }


def main(path: Path, report: Path, page: Path) -> None:
    """Write the list, and print how many cases are in it."""
    seconds = times(report)
    cases = extended(seconds, {row[2] for row in read_rows(page, "mutations")})
    write_atomically(path, "".join(f"{case}\n" for case in cases))
    share = sum(seconds[case] for case in cases) / sum(seconds.values())
    print(f"{len(cases):,} of {len(seconds):,} cases are extended; they take {share:.0%} of the time")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.extended_tests LIST REPORT PAGE")
    main(*map(Path, sys.argv[1:]))
