"""The table of trainings that move to `transformers`' Trainer and back, against trainings that stay.

`python -m benchmarks.training.trainer PAGE` prints it and writes it into the page.
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.pages import marks, write_table
from parity_tests.support.trainer import Handover, measure

# variant of a family -> settings of the training, in addition to those of `measure`
CASES: dict[str, dict[str, Any]] = {
    "Marian": {"schedule": "inverse_sqrt", "weight_decay": 0.01},
    "BART": {"weight_decay": 0.01},
    "BART, untied, scaled": {"schedule": "cosine", "weight_decay": 0.1},
    "mBART": {"schedule": "constant"},
    "M2M100": {"schedule": "noam", "learning_rate": 0.1, "first_update": 1},
    "Pegasus": {"final_learning_rate": 1e-3, "weight_decay": 0.01},
    "Blenderbot": {"schedule": "cosine", "final_learning_rate": 1e-3},
    "T5": {"schedule": "inverse_sqrt"},
    "T5 v1.1, Flan-T5": {"clip_norm": None},
    "mT5": {"schedule": "cosine"},
    "UMT5": {},
}


def main(page: Path) -> int:
    """Measures, prints the table, writes it into the page. Returns 0 if every training is within its bounds."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the models are tiny; waiting threads take time from JAX
    marks(page, "trainer")
    rows: list[Handover] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        for name, settings in track(CASES.items(), "trainings", console=Console(stderr=True), transient=True):
            rows.append(measure(name, Path(folder) / name, **settings))
    header = ("model", "schedule", "weight decay", "loss", "parameters", "moments")
    write_table(page, "trainer", header, [_cells(row) for row in rows])
    return 0 if all(row.ok for row in rows) else 1


def _cells(row: Handover) -> tuple[str, ...]:
    differences = (f"{value:.1e}" for value in (row.loss, row.parameters, row.moments))
    return (row.name, row.schedule, f"{row.weight_decay:g}", *differences)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.training.trainer PAGE")
    sys.exit(main(Path(sys.argv[1])))
