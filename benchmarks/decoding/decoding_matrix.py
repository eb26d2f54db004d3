"""Tables that compare decoding token by token: Flax, PyTorch, and `transformers`' `generate`.

`python -m benchmarks.decoding.decoding_matrix PAGE` prints them and writes them into the page.
"""

import logging
import sys
import tempfile
from itertools import product
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import track

from benchmarks.pages import marks, write_table
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
        kinds = [
            (kind, name, dtype, compare_kind(families[name][1], dtype, kind))
            for kind, name, dtype in track([*product(KINDS, FAMILIES, ROUNDING)], "kinds", **progress)
        ]
    header = ("model", "dtype", "beam", "Flax = PyTorch", "transformers = PyTorch", "score difference of Flax")
    write_table(page, "decoding", header, [_cells(row) for row in rows])
    write_table(page, "rules", ("mistake in the rule", *FAMILIES), rules)
    cells = [(kind, name, dtype, *_counts(agreement, 200)) for kind, name, dtype, agreement in kinds]
    write_table(page, "kinds", ("decoding", "model", "dtype", "Flax = PyTorch"), cells)
    return 0 if all(row.ok for row in rows) and not any(agreement.different for *_, agreement in kinds) else 1


def _cells(row: Row) -> tuple[str, ...]:
    agreements = _counts(row.flax, len(row.lengths)) + _counts(row.transformers, len(row.lengths))
    return (row.name, row.dtype, str(row.beam_size), *agreements, f"{row.flax.score_error:.1e}")


def _counts(agreement: Agreement, sentences: int) -> tuple[str]:
    """How many sentences are equal, and how many of the others rounding explains."""
    others = {"within rounding": agreement.ties, "DIFFERENT": agreement.different}
    text = "".join(f", {len(margins)} {name}" for name, margins in others.items() if margins)
    return (f"{agreement.equal} of {sentences}{text}",)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.decoding.decoding_matrix PAGE")
    sys.exit(main(Path(sys.argv[1])))
