"""The ladder as a table on the terminal."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..train.tracking.progress import counted
from .ladder import POOLED, RATIO_BOUND, Ladder, run_ladder


def show_ladder(title: str, *args: Any, oracle_name: str = "", **kwargs: Any) -> Ladder:
    """Climbs the ladder, `run_ladder(*args, **kwargs)`, with a progress bar, and prints it."""
    console = Console()
    with counted() as progress:
        ladder = run_ladder(*args, progress=progress, reproduce=title, **kwargs)
    console.print(_table(title, ladder, oracle_name))
    console.print(_caption(ladder, oracle_name), style="dim")
    for name, report in {"PyTorch and Flax": ladder.report, **ladder.oracle_reports}.items():
        if not report.ok:
            versus = "" if report is ladder.report else f" and {oracle_name}"
            console.print(f"{name}{versus}: {report}", markup=False, style="red")
    return ladder


def as_document(ladder: Ladder) -> dict[str, Any]:
    """What the table says, as JSON has it."""
    reports = {"PyTorch and Flax": ladder.report, **ladder.oracle_reports}
    return {
        "equal": ladder.ok,
        "rungs": [asdict(rung) for rung in ladder.rungs],
        "product_ratio": ladder.product_ratio,
        "sentences": ladder.covered.sentences,
        "inputs": asdict(ladder.covered),
        "ratios_decide": ladder.ratios_decide,
        "differences": {name: str(report) for name, report in reports.items() if not report.ok},
    }


def _caption(ladder: Ladder, oracle_name: str) -> str:
    said = f"float64: worst difference between the two models on the CPU. Inputs: {ladder.covered}. "
    said += f"{oracle_name}: worst float64 difference of either model from it. " if oracle_name else ""
    if all(rung.float32_ratio is None for rung in ladder.rungs):
        return f"{said}Too few different sentences for float32 and bf16: not compared there."
    said += f"float32, bf16: Flax's error over PyTorch's, both against float64, over {POOLED} inputs"
    if not ladder.ratios_decide:
        return f"{said}; on text it informs and does not decide."
    return (
        f"{said}; neither may be more than {RATIO_BOUND} times the other's. Bare float32 matrix products of this "
        f"width: {ladder.product_ratio:.2f}; above 1, this widens float32's bound."
    )


def _table(title: str, ladder: Ladder, oracle_name: str) -> Table:
    table = Table("rung", title=escape(title), title_justify="left")
    for name in ("float64", *filter(None, [oracle_name]), "float32", "bf16"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for rung in ladder.rungs:
        errors = [rung.error, rung.oracle_error] if oracle_name else [rung.error]
        texts = ["–" if error is None else f"{error:.1e}" if error else "0" for error in errors]
        ratios = ("–" if ratio is None else f"{ratio:.2f}" for ratio in (rung.float32_ratio, rung.bfloat16_ratio))
        verdict = "[green]equal[/]" if rung.ok else "[bold red]DIFFERENT[/]"
        table.add_row(rung.name, *texts, *ratios, verdict)
    return table
