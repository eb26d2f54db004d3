"""A table of the planted mistakes and the audit questions that find them.

`python -m benchmarks.audit.audit_defects PAGE` writes it into the page.
"""

import sys
from pathlib import Path

import torch

from benchmarks.pages import write_table
from parity_tests.support.defects import DEFECTS, examine


def main(page: Path) -> None:
    """Write the table."""
    torch.set_num_threads(1)  # more threads are slower at these sizes
    rows = []
    for defect in DEFECTS:
        answers = {answer.question: answer for answer in examine(defect).findings}
        answer = answers.get(defect.question)
        cells = (answer.measured, answer.where) if answer else ("NOT FOUND", "")
        rows.append((defect.name, defect.question, *cells))
    write_table(page, "defects", ("mistake", "found by", "measured", "first in"), rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
