"""Plants every mistake of the list, one at a time, and writes what caught it: `make mutations`.

`python -m benchmarks.mutations PAGE [WORDS]` takes those whose area, name or place contains a word.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks.pages import marks, write_table
from parity_tests.mutations import ladder_mistakes
from parity_tests.mutations.areas import AREAS, MUTATIONS, plant
from parity_tests.mutations.planting import MutationError

HEADER = ("area", "mistake", "where", "caught by", "seconds")


def in_the_ladder() -> list[tuple[str, ...]]:
    """Rows of the mistakes that are put into the PyTorch twin in this process, and the rung that sees each."""
    rows = []
    with jax.enable_x64(True):
        for mistake in ladder_mistakes.MISTAKES:
            rung = ladder_mistakes.run(mistake).failed_rung
            rows.append(("ladder", mistake.name, "torch_reference", f"rung: {rung}" if rung else "SURVIVED", ""))
    return rows


def main(page: Path, words: Sequence[str]) -> int:
    """Prints the table and writes it into the page; rows of what was not chosen stay. Returns 0 without a survivor."""
    marks(page, "mutations")
    area_of = {mutation: area for area, mutations in AREAS.items() for mutation in mutations}
    chosen = [m for m in MUTATIONS if not words or any(w in f"{area_of[m]} {m.name} {m.place}" for w in words)]
    try:
        verdicts = plant(chosen, Console(stderr=True))
    except MutationError as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 2
    rows = [
        (area_of[v.mutation], v.mutation.name, f"`{v.mutation.place}`", str(v).replace("|", "¦"), f"{v.seconds:.0f}")
        for v in verdicts
    ]
    rows += [] if words and "ladder" not in words else in_the_ladder()
    fresh = {row[:2]: row for row in rows}
    order = [(area_of[m], m.name) for m in MUTATIONS] + [("ladder", m.name) for m in ladder_mistakes.MISTAKES]
    known = {row[:2]: row for row in _written(page)} | fresh
    write_table(page, "mutations", HEADER, [known[key] for key in order if key in known])
    survivors = [row for row in rows if row[3].startswith(("SURVIVED", "its checks do not run"))]
    print(f"{len(rows) - len(survivors)} of {len(rows)} mistakes caught")
    for row in survivors:
        print(f"{row[1]}, in {row[2]}: {row[3]}")
    return 1 if survivors else 0


def _written(page: Path) -> list[tuple[str, ...]]:
    """The rows of the table that is in the page."""
    begin, end = marks(page, "mutations")
    lines = page.read_text(encoding="utf-8").split(begin)[1].split(end)[0].strip().splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.mutations PAGE [WORDS]")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
