"""Audits every text-to-text encoder-decoder of `transformers`, in a small size with random weights.

`python -m benchmarks.audit.audit_transformers PAGE` writes the table into a page. Exit status 1 if a model fails a
question that `EXPLAINED` does not list, or passes one that it lists.
"""

import sys
from pathlib import Path

import torch
import transformers
from rich.console import Console

from benchmarks.pages import marks, write_between, write_table
from parity_tests.support.transformers_audit import EXPLAINED, architectures, complaints, explanation, small_model
from twinax.audit import Audit, audit

TABLE, LEFT_OUT = "transformers", "left out of transformers"
HEADER = ("class", "dtype of the audit", "passed", "failures and reasons")


def _row(report: Audit) -> tuple[str, ...]:
    answers = [answer for answer in report.answers if answer.ok is not None]
    questions: dict[str, list[str]] = {}
    for answer in report.findings:
        reason = explanation(report, answer) or f"NOT EXPLAINED: {answer.measured}"
        questions.setdefault(reason, []).append(answer.question)
    cells = [f"{' '.join(names)} No: {reason}." for reason, names in questions.items()]
    dtype = f"{report.dtype}: {report.dtype_reason}" if report.dtype_reason else report.dtype
    return report.name, dtype, f"{sum(answer.ok is True for answer in answers)} of {len(answers)}", " ".join(cells)


def main(page: Path) -> int:
    """Write the table; return the exit status."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # more threads are slower at these sizes
    for name in (TABLE, LEFT_OUT):
        marks(page, name)  # checked before the work
    included, left_out = architectures()
    rows, problems = [], []
    for architecture in included:
        try:
            report = audit(small_model(architecture))
        except Exception as error:  # a class that cannot be built or called gets a row too
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            rows.append((architecture.__name__, "", "", f"NOT AUDITED: {reason}"))
            problems.append(f"{architecture.__name__}: {reason}")
            continue
        rows.append(_row(report))
        problems += complaints(report)
    names = {architecture.__name__ for architecture in included}
    problems += [f"{name}: not in transformers. Remove it from EXPLAINED" for name, _ in EXPLAINED if name not in names]
    write_table(page, TABLE, HEADER, rows)
    names = ", ".join(architecture.__name__ for architecture in left_out)
    write_between(page, LEFT_OUT, f"{names} (transformers {transformers.__version__}).")
    for problem in problems:
        Console(stderr=True).print(problem, style="red", markup=False, highlight=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
