"""Plants every mistake of the list, one at a time, and writes which test catches it: `make mutations`.

`python -m benchmarks.mutations PAGE [WORDS]` plants those whose area, name or place contains one of the words.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks.pages import marks, read_rows, write_table
from parity_tests.ladder import mistakes
from parity_tests.mutations.areas import AREAS, MUTATIONS, plant
from parity_tests.mutations.planting import MutationError

HEADER = ("area", "mistake", "caught by")


def in_the_ladder() -> list[tuple[str, ...]]:
    """Rows of the mistakes that are planted into the PyTorch twin in this process, with the rung that detects each."""
    rows = []
    with jax.enable_x64(True):
        for mistake in mistakes.MISTAKES:
            rung = mistakes.run(mistake).failed_rung
            rows.append(("ladder", mistake.name, f"rung: {rung}" if rung else "SURVIVED"))
    return rows


def main(page: Path, words: Sequence[str]) -> int:
    """Print the table and update its rows in the page. Returns 0 if every mistake is caught."""
    marks(page, "mutations")
    area_of = {mutation: area for area, members in AREAS.items() for mutation in members}
    mutations = [m for m in MUTATIONS if not words or any(w in f"{area_of[m]} {m.name} {m.place}" for w in words)]
    try:
        verdicts = plant(mutations, Console(stderr=True))
    except MutationError as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 2
    rows = [(area_of[v.mutation], v.mutation.name, str(v).replace("|", "¦")) for v in verdicts]
    rows += [] if words and "ladder" not in words else in_the_ladder()
    new_rows = {row[:2]: row for row in rows}
    order = [(area_of[m], m.name) for m in MUTATIONS] + [("ladder", m.name) for m in mistakes.MISTAKES]
    rows_by_key = {row[:2]: row for row in read_rows(page, "mutations")} | new_rows
    write_table(page, "mutations", HEADER, [rows_by_key[key] for key in order if key in rows_by_key])
    survivors = [row for row in rows if row[2].startswith(("SURVIVED", "its checks do not run"))]
    print(f"{len(rows) - len(survivors)} of {len(rows)} mistakes caught")
    for row in survivors:
        print(f"{row[0]}, {row[1]}: {row[2]}")
    return 1 if survivors else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.mutations PAGE [WORDS]")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
