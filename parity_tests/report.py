"""The ladder as a table on the terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..configs.schema import TransformerConfig
from .ladder import POOLED, RATIO_BOUND, Rung, climb


def show_ladder(config: TransformerConfig, title: str, seed: int = 0) -> bool:
    """Climbs the ladder with a progress bar and prints it; True where every rung holds."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        ladder = climb(
            config,
            seed,
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            reproduce=title,
        )
    console.print(_table(title, ladder.rungs))
    console.print(
        "float64: worst difference between the two models on the CPU. float32, bf16: Flax's error over PyTorch's, both "
        f"against float64, over {POOLED} inputs; neither may be more than {RATIO_BOUND} times the other's. "
        f"Bare float32 matrix products of this width: {ladder.product_ratio:.2f}; above 1, it widens float32's bound.",
        style="dim",
    )
    if not ladder.report.ok:
        console.print(str(ladder.report), markup=False, style="red")
    return ladder.ok


def _table(title: str, rungs: tuple[Rung, ...]) -> Table:
    table = Table("rung", title=title, title_justify="left")
    for name in ("float64 error", "float32 ratio", "bf16 ratio"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for rung in rungs:
        ratios = ("–" if ratio is None else f"{ratio:.2f}" for ratio in (rung.float32_ratio, rung.bfloat16_ratio))
        verdict = "[green]equal[/]" if rung.ok else "[bold red]DIFFERENT[/]"
        table.add_row(rung.name, f"{rung.error:.1e}" if rung.error else "0", *ratios, verdict)
    return table
