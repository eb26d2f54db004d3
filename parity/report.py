"""The ladder as a table on the terminal."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..compare import report as comparison_report
from ..train.tracking.progress import progress_bar
from .ladder import RATIO_BOUND, Ladder, numbers, run_ladder


def show_ladder(title: str, *args: Any, oracle_name: str = "", **kwargs: Any) -> Ladder:
    """Run `run_ladder(*args, **kwargs)` with a progress bar and print the ladder."""
    console = Console()
    with progress_bar() as progress:
        ladder = run_ladder(*args, progress=progress, reproduce=title, **kwargs)
    console.print(table(title, ladder, oracle_name))
    console.print(caption(ladder, oracle_name), style="dim")
    for name, report in {"PyTorch and Flax": ladder.report, **ladder.oracle_reports}.items():
        if not report.ok:
            suffix = "" if report is ladder.report else f" and {oracle_name}"
            console.print(f"{name}{suffix}: {report}", markup=False, style="red")
    if ladder.comparison is not None:
        console.print("Where the models diverge (candidate: Flax, reference: PyTorch):")
        comparison_report.show_differences(ladder.comparison, console)
    return ladder


def as_document(ladder: Ladder) -> dict[str, Any]:
    """The contents of the table for JSON."""
    reports = {"PyTorch and Flax": ladder.report, **ladder.oracle_reports}
    return {
        "equal": ladder.ok,
        "rungs": [asdict(rung) for rung in ladder.rungs],
        "product_ratio": ladder.product_ratio,
        "sum_ratio": ladder.sum_ratio,
        "sentences": ladder.coverage.sentences,
        "pooled_inputs": ladder.inputs,
        "inputs": asdict(ladder.coverage),
        "ratios_decide": ladder.ratios_decide,
        "differences": {name: str(report) for name, report in reports.items() if not report.ok},
        "comparison": None if ladder.comparison is None else comparison_report.as_document(ladder.comparison),
    }


def table(title: str, ladder: Ladder, oracle_name: str) -> Table:
    """One row per rung."""
    rows = Table("rung", title=escape(title), title_justify="left")
    for name in ("float64", *filter(None, [oracle_name]), "float32\nratio", "bf16\nratio"):
        rows.add_column(name, justify="right")
    rows.add_column("verdict")
    for rung in ladder.rungs:
        verdict = "[green]equal[/]" if rung.ok else "[bold red]DIFFERENT[/]"
        rows.add_row(rung.name, *numbers(rung, oracle_name), verdict)
    return rows


def caption(ladder: Ladder, oracle_name: str) -> str:
    """What the columns of the ladder's table are, over which inputs, and why some cells are empty."""
    text = f"float64: largest difference between the two models on the CPU. Inputs: {ladder.coverage}. "
    text += f"{oracle_name}: largest float64 difference of either model from it. " if oracle_name else ""
    if ladder.sentences_needed is not None:
        return (
            f"{text}Too few distinct sentences for float32 and bf16, which need at least {ladder.sentences_needed}: "
            "not compared."
        )
    if all(rung.float32_ratio is None for rung in ladder.rungs):
        return f"{text}float32 and bf16: not compared."
    inputs = f"{ladder.inputs} input{'s' if ladder.inputs > 1 else ''}"
    text += f"Ratio: Flax error / PyTorch error, both against float64, over {inputs}"
    if not ladder.ratios_decide:
        return f"{text}. On text, the ratios do not affect the verdict."
    text += (
        f"; must be between 1/{RATIO_BOUND} and {RATIO_BOUND}. The float32 bounds are widened by the ratio of "
        f"isolated float32 matmuls of this width, {ladder.product_ratio:.2f}"
    )
    if ladder.sum_ratio is None:
        return f"{text}."
    text += f", those of gradients by that of sums over the rows of a batch, {ladder.sum_ratio:.2f}."
    if any(rung.float32_ratio is None for rung in ladder.rungs if rung.name == "gradients"):
        text += " Rounding flipped a ReLU, so that float32 gradients are not compared."
    return text
