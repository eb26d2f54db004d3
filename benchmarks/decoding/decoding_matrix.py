"""Tables that compare decoding token by token: Flax, PyTorch, and `transformers`' `generate`.

`python -m benchmarks.decoding.decoding_matrix PAGE` prints them and writes them into the page.
"""

import logging
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import track

from benchmarks.pages import marks, write_table
from twinax.convert.checkpoint import Checkpoint
from twinax.parity.search.decoding import (
    FAMILIES,
    KINDS,
    ROUNDING,
    WRONG_RULES,
    Agreement,
    Row,
    compare_kind,
    count_differences,
    measure,
    random_family,
    reference_decoding,
)


def main(page: Path) -> int:
    """Measures, prints the tables, writes them into the page. Returns 0 if all is equal."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for name in ("decoding", "rules", "kinds"):
        marks(page, name)
    rows, rules = [], []
    progress = {"console": Console(stderr=True), "transient": True}
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        families = {name: random_family(name, Path(folder) / name) for name in FAMILIES}
        for name, dtype, beam_size in track(list(product(FAMILIES, ROUNDING, (1, 4))), "searches", **progress):
            rows.append(measure(name, *families[name], dtype, beam_size))
        references = {name: (reference_decoding(*families[name]), families[name][1]) for name in FAMILIES}
        for rule in track(WRONG_RULES, "rules", **progress):
            rules.append((rule, *(str(count_differences(*references[name], rule)) for name in FAMILIES)))
        kinds = measure_kinds({name: checkpoint for name, (_, checkpoint) in families.items()})
    header = ("model", "dtype", "beam", "Flax = PyTorch", "transformers = PyTorch", "score difference of Flax")
    write_table(page, "decoding", header, [_cells(row) for row in rows])
    write_table(page, "rules", ("mistake in the rule", *FAMILIES), rules)
    write_kinds(page, kinds)
    return 0 if all(row.ok for row in rows) and not any(a.different for a in kinds.values()) else 1


def measure_kinds(families: Mapping[str, Checkpoint]) -> dict[tuple[str, str], Agreement]:
    """(kind of decoding, family) -> agreement of Flax with PyTorch in float32."""
    cases = track([*product(KINDS, families)], "kinds", console=Console(stderr=True), transient=True)
    return {(kind, name): compare_kind(families[name], "float32", kind) for kind, name in cases}


def write_kinds(page: Path, kinds: Mapping[tuple[str, str], Agreement]) -> None:
    """Print and write the table of `measure_kinds`."""
    names = [*dict.fromkeys(name for _, name in kinds)]
    rows = [(kind, *(_counts(kinds[kind, name], 200) for name in names)) for kind in KINDS]
    write_table(page, "kinds", ("Flax = PyTorch", *names), rows)


def _cells(row: Row) -> tuple[str, ...]:
    agreements = _counts(row.flax, len(row.lengths)), _counts(row.transformers, len(row.lengths))
    return (row.name, row.dtype, str(row.beam_size), *agreements, f"{row.flax.score_error:.1e}")


def _counts(agreement: Agreement, sentences: int) -> str:
    """How many sentences are equal, and how many of the others rounding explains."""
    others = {"within rounding": agreement.ties, "DIFFERENT": agreement.different}
    text = "".join(f", {len(margins)} {name}" for name, margins in others.items() if margins)
    return f"{agreement.equal} of {sentences}{text}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.decoding.decoding_matrix PAGE")
    sys.exit(main(Path(sys.argv[1])))
