"""The picture of a sweep: time per update over the number of chips."""

from collections.abc import Mapping, Sequence
from typing import Any

_LABELED = 12  # points with their shapes: more would overlap


def plot_sweep(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draw the fastest mesh of each slice, per kind of chip, with the line of perfect scaling from its smallest.

    `rows`: those of a sweep, with `topology`, `chips`, `seconds_per_update` and `how`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (chip, fastest) in enumerate(_fastest(rows).items()):
        sizes, color = sorted(fastest), f"C{number}"
        times = {n: fastest[n]["seconds_per_update"] * 1e3 for n in sizes}
        perfect = [times[sizes[0]] * sizes[0] / n for n in sizes]
        axes.plot(sizes, perfect, color=color, linestyle=":", linewidth=1)
        axes.plot(sizes, [times[n] for n in sizes], "o-", color=color, markerfacecolor="white", label=chip)
        compiled = [n for n in sizes if fastest[n]["how"] == "compiled"]
        axes.plot(compiled, [times[n] for n in compiled], "o", color=color)
        for n in sizes if len(rows) <= _LABELED else ():
            shape = fastest[n]["topology"].partition(":")[2]
            axes.annotate(shape, (n, times[n]), (4, 4), textcoords="offset points", fontsize=8)
    axes.plot([], [], ":", color="0.4", label="perfect scaling")
    axes.plot([], [], "o", color="0.4", label="compiled; others computed")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["chips"] for row in rows})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.set(xlabel="chips", ylabel="milliseconds per update, at least")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _fastest(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """By chip and number of chips, the row of the shortest time."""
    fastest: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        chip = fastest.setdefault(row["topology"].partition(":")[0], {})
        if row["chips"] not in chip or row["seconds_per_update"] < chip[row["chips"]]["seconds_per_update"]:
            chip[row["chips"]] = row
    return fastest
