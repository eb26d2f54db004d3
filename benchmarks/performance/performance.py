"""Everything that is compared in speed, in one command: `python -m benchmarks.performance.performance PAGE [PART ...]`.

Times train steps and beam search of twinax and of what people use instead, in turn, and checks that all do the same
work. Writes the tables into the page, and beside it NAME.json and NAME.png. Parts: decoding, and training 0 to 3. Parts
that are not named keep their figures. About an hour on two idle cores.
"""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.alternating import spread
from benchmarks.multi30k.runs import describe_machine
from benchmarks.pages import marks, write_table
from benchmarks.performance import decoding, training_speed

NAMES = ("training speed", "decoding speed")
HEADER = ("work", "program", "milliseconds", "time / that of twinax in float32", "in the same dtype", "machine")
PARTS = ("decoding", *map(str, range(len(training_speed.SIZES))))


def main(page: Path, parts: Sequence[str]) -> None:
    """Measure the parts; write tables, figures and chart after each."""
    for name in NAMES:
        marks(page, name)
    path = page.with_suffix(".json")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for part in parts:
        for label, seconds in _decoding() if part == "decoding" else _training(int(part)):
            results[label] = {"machine": describe_machine(f"{os.cpu_count()} cores"), "seconds": seconds}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        write(page, results)


def _training(number: int) -> list[tuple[str, Mapping[str, Sequence[float]]]]:
    size = training_speed.SIZES[number]
    return [(size.label, training_speed.compare(size))]


def _decoding() -> list[tuple[str, Mapping[str, Sequence[float]]]]:
    """Raises: SystemExit if two programs in float32 write other tokens in greedy search."""
    rows = decoding.compare(decoding.BEAMS, decoding.ROUNDS)
    for row in rows:
        equal = dict(row.equal)
        others = {equal[decoding.TWINAX], *([equal[decoding.CTRANSLATE2]] if row.beam_size == 1 else [])}
        if others != {decoding.SENTENCES}:
            sys.exit(f"beam {row.beam_size}: the programs write different tokens: {equal}")
        print(f"beam {row.beam_size}: sentences as in transformers, of {decoding.SENTENCES}: {equal}")
    return [(f"beam {row.beam_size}", row.seconds) for row in rows]


def write(page: Path, results: Mapping[str, Any]) -> None:
    """Write the tables and the chart of what was measured."""
    groups = {
        name: {label: r for label, r in results.items() if label.startswith("beam") == (name == NAMES[1])}
        for name in NAMES
    }
    for name, group in groups.items():
        rows = [row for label, result in group.items() for row in _rows(label, result)]
        write_table(page, name, HEADER, rows)
    plot(results, page.with_suffix(".png"))


def _rows(label: str, result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    measured, reference = result["seconds"], result["seconds"][training_speed.TWINAX]
    rows = []
    for name, seconds in measured.items():
        program, dtype, *_ = name.split(", ")
        same_dtype = "–" if dtype == "float32" or program == "twinax" else spread(seconds, measured[f"twinax, {dtype}"])
        milliseconds = f"{1000 * statistics.median(seconds):,.0f}"
        rows.append((label, name, milliseconds, spread(seconds, reference), same_dtype, result["machine"]))
    return rows


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the median ratios as bars, with the smallest and largest ratio as lines."""
    figure = Figure(
        figsize=(8, 0.6 + 0.22 * sum(len(r["seconds"]) + 1.5 for r in results.values())), layout="constrained"
    )
    axes = figure.subplots()
    position, ticks = 0.0, []
    for label, result in results.items():
        ticks.append((position, label))
        for name, seconds in result["seconds"].items():
            position -= 1
            ratios = [a / b for a, b in zip(seconds, result["seconds"][training_speed.TWINAX], strict=True)]
            median = statistics.median(ratios)
            color = "C0" if name.startswith("twinax") else "C7"
            axes.barh(position, median, color=color, xerr=[[median - min(ratios)], [max(ratios) - median]])
            ticks.append((position, name))
        position -= 1.5
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="time / that of twinax in float32; shorter is faster", ylim=(position + 1, 1))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not {*sys.argv[2:]} <= {*PARTS}:
        sys.exit(f"usage: python -m benchmarks.performance.performance PAGE [{'|'.join(PARTS)} ...]")
    main(Path(sys.argv[1]), sys.argv[2:] or PARTS)
