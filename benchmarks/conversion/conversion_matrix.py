"""Tables that compare the families of `transformers`, and the checkpoints of other toolkits, with the twins.

`python -m benchmarks.conversion.conversion_matrix PAGE` prints them and writes them into the page.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.conversion.family_table import HEADER as FAMILY_HEADER
from benchmarks.conversion.family_table import family_rows
from benchmarks.pages import marks, write_table
from parity_tests.support import legacy_flax_files
from parity_tests.support.conversion import VARIANTS, Row, measure
from parity_tests.support.fairseq_files import FAIRSEQ, measure_fairseq
from parity_tests.support.marian_files import MARIAN, measure_marian

HEADER = ("family", "encoder output", "logits", "gradients", "attention weights", "round trip")
FLAX_HEADER = ("directory", "Flax twin", "PyTorch twin", "transformers 5", "tensors")


def as_cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    errors = (f"{error:.1e}" for error in (row.encoder, row.logits, row.gradients, row.maps))
    return (row.name, *errors, ", ".join(row.changes) or "identical")


def flax_cells(row: legacy_flax_files.Row) -> tuple[str, ...]:
    """A row of the table of Flax classes."""
    errors = (f"{row.errors[framework]:.1e}" for framework in ("Flax", "PyTorch", "transformers"))
    return (row.name, *errors, ", ".join(row.changes) or "identical")


def measure_flax_classes(page: Path) -> list[legacy_flax_files.Row]:
    """Measure the directories of Flax classes and write their table into the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [legacy_flax_files.measure(name, Path(folder)) for name in legacy_flax_files.MODELS]
    write_table(page, "legacy-flax", FLAX_HEADER, [flax_cells(row) for row in rows])
    return rows


def main(page: Path) -> int:
    """Measure every variant, print the tables, write them into the page. Returns 0 if all hold."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # `transformers` warns about how it writes
    torch.set_num_threads(1)  # the models are small
    for name in ("conversion-matrix", "families", "legacy-flax"):
        marks(page, name)
    flax_rows = measure_flax_classes(page)
    measures: dict[str, Callable[[str, Path], Row]] = dict.fromkeys(VARIANTS, measure)
    measures |= dict.fromkeys(FAIRSEQ, measure_fairseq) | dict.fromkeys(MARIAN, measure_marian)
    rows = []
    for name in track(measures, "families", console=Console(stderr=True), transient=True):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measures[name](name, Path(folder)))
    write_table(page, "conversion-matrix", HEADER, [as_cells(row) for row in rows])
    cells, equal = family_rows({row.name: row for row in rows}, {row.name: row for row in flax_rows})
    write_table(page, "families", FAMILY_HEADER, cells)
    for report in (report for row in rows for report in row.reports if not report.ok):
        print(report)
    return 0 if equal and all(row.ok for row in (*rows, *flax_rows)) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.conversion.conversion_matrix PAGE")
    sys.exit(main(Path(sys.argv[1])))
