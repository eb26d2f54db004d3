"""A comparison as a table on the terminal, and as a document for programs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .capture.trace import Operation, Trace
from .comparison import Comparison
from .matching.uses import USE
from .matching.weights import Match, WeightMap
from .repair.defect import Defect
from .repair.diagnosis import Diagnosis

SCHEMA = 1  # of `as_document`; incremented when a field changes its meaning
_MOST = 4  # lines of a defect on the terminal
_PLACE = 24  # characters of a place that are not folded
_CHANGE = 17  # characters of a repair's column, at least if it has as many
_FRAME = 28  # characters of the table's other columns and lines
_NARROW = 8  # characters of a narrow column
_COLORS = {True: "green", False: "bold red"}


def as_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison for JSON; docs/compare.md describes the fields."""
    forward, backward = comparison.forward, comparison.backward
    return {
        "schema": SCHEMA,
        "verdict": comparison.verdict,
        "equal": comparison.ok,
        "outputs": _findings(forward),
        "gradients": _findings(backward) if backward is not None else None,
        "optimizer": None if comparison.update is None else [asdict(difference) for difference in comparison.update],
        "rounding": [
            {
                "dtype": entry.dtype,
                "reference_error": entry.reference,
                "candidate_error": _finite(entry.candidate),
                "ratio": None if entry.failure else _finite(entry.ratio),
                "inputs": entry.inputs,
                "ok": entry.ok,
                "failure": entry.failure,
                "casts": list(entry.casts),
            }
            for entry in comparison.rounding
        ],
        "weights": _weights(forward.weights, comparison.traces) if forward.weights is not None else None,
        "rearranged_outputs": list(forward.rearranged),
        "not_tested": list(comparison.coverage_gaps),
        "cost": {
            "seconds": {name: round(value, 2) for name, value in comparison.seconds.items()},
            "operations": [len(trace.operations) for trace in comparison.traces],
        },
    }


def _finite(number: float) -> float | None:
    """The number; None if JSON has no such number."""
    return number if math.isfinite(number) else None


def _findings(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "verdict": diagnosis.verdict,
        "reason": diagnosis.reason,
        "matched_values": list(diagnosis.matched),
        "verified": diagnosis.verified,
        "defects": [_defect(group) for group in grouped(diagnosis.defects)],
        "float32_constants": [_defect(group) for group in grouped(diagnosis.roundings)],
    }


def grouped(defects: Iterable[Defect]) -> list[list[Defect]]:
    """Group defects with the same lines and repair, such as one per layer, in order of execution."""
    groups: dict[object, list[Defect]] = {}
    for defect in defects:
        groups.setdefault((defect.lines, str(defect.repair), defect.note), []).append(defect)
    return list(groups.values())


def _defect(group: Sequence[Defect]) -> dict[str, Any]:
    first, repair = group[0], group[0].repair
    return {
        "lines": list(first.lines),
        "called_from": called_from(group),
        "occurrences": len(group),
        "modules": modules(group),
        "error": max(defect.error for defect in group),
        "candidate": _side(first.candidate),
        "reference": _side(first.reference),
        "repair": None if repair is None else {"text": str(repair), "parameter": repair.parameter},
        "note": first.note,
    }


def called_from(group: Sequence[Defect]) -> list[str]:
    """The lines that call the line of the repair, the nearest first; of several defects the nearest of each."""
    operations = [d.repair.operation for d in group if d.repair is not None and d.repair.operation is not None]
    callers = [operation.lines[1:] if len(group) == 1 else operation.lines[1:2] for operation in operations]
    return list(dict.fromkeys(line for lines in callers for line in lines))


def modules(group: Sequence[Defect]) -> list[str]:
    """The candidate's modules in which a defect occurs."""
    return list(dict.fromkeys(o.module for defect in group for o in defect.candidate if o.module))


def _side(operations: Sequence[Operation]) -> dict[str, Any]:
    return {
        "lines": places(operations),
        "operations": list(dict.fromkeys(o.name for o in operations if o.name != USE)),
    }


def places(operations: Iterable[Operation]) -> list[str]:
    """Lines of operations, or paths of modules where no line is known; none for a library's code outside of modules."""
    return [place for place in dict.fromkeys(o.line or o.module for o in operations) if place]


def _weights(weights: WeightMap, traces: Sequence[Trace]) -> dict[str, Any]:
    return {
        "matches": {name: expressions(match, traces[0]) for name, match in weights.matches.items()},
        "ambiguous": {name: list(sources) for name, sources in weights.ambiguous.items()},
        "unmatched": list(weights.unmatched),
        "unused": list(weights.unused),
        "tied": {name: list(others) for name, others in weights.ties.items()},
    }


def expressions(match: Match, reference: Trace) -> list[str]:
    """Where a candidate's parameter comes from, part by part, in NumPy, with notes."""
    texts = []
    for part in match.parts:
        shape = reference.values.kept(reference.parameters[part.source]).shape
        text = part.layout.code(f"state[{part.source!r}]", shape)
        text += f" + state[{match.added_to!r}], arranged alike" if match.added_to else ""
        text += f" {'+' if match.shift > 0 else '-'} {abs(match.shift)}" if match.shift else ""
        texts.append(text + (f", elsewhere {match.padding:g}" if match.padding is not None else ""))
    return texts


def show(comparison: Comparison, names: tuple[str, str], console: Console | None = None) -> None:
    """Print the verdict, the defects, and what was not tested."""
    console = console or Console()
    color = _COLORS[comparison.ok]
    console.print(f"[{color}]{escape(comparison.verdict)}[/]: {escape(names[1])} against {escape(names[0])}")
    show_findings(comparison, console)


def show_findings(comparison: Comparison, console: Console) -> None:
    """Print the defects, what was compared besides, and what was not tested."""
    show_differences(comparison, console)
    for difference in comparison.update or ():
        console.print(f"optimizer: {difference}", markup=False)
    if comparison.update == ():
        console.print("optimizer: equal updates")
    for entry in comparison.rounding:
        console.print(str(entry), markup=False)
    weights = comparison.forward.weights
    if weights is not None:
        total = len(weights.matches) + len(weights.ambiguous) + len(weights.unmatched)
        console.print(f"parameters: {len(weights.matches)} of {total} identified", markup=False)
    for sentence in comparison.forward.rearranged:
        console.print(f"output {sentence}", markup=False)
    for sentence in comparison.coverage_gaps:
        console.print(f"not tested: {sentence}", markup=False, style="dim")


def show_differences(comparison: Comparison, console: Console) -> None:
    """Print the defects of the outputs and of the gradients, or why there are none."""
    for title, diagnosis in (("outputs", comparison.forward), ("gradients", comparison.backward)):
        if diagnosis is not None and diagnosis.reason:
            console.print(f"{title}: {diagnosis.reason}", markup=False)
        if diagnosis is not None and (diagnosis.defects or diagnosis.roundings):
            console.print(_table(title, diagnosis, console.width))


def _table(title: str, diagnosis: Diagnosis, width: int) -> Table:
    table = Table("#", title=title, title_justify="left")
    repair = (
        "repair that\nmakes both equal" if diagnosis.verified or diagnosis.ok else "change that makes\nthis value equal"
    )
    groups = [(str(i), group) for i, group in enumerate(grouped(diagnosis.defects), 1)]
    groups += [("float32", group) for group in grouped(diagnosis.roundings)]
    lines = [line for defect in diagnosis.defects for line in (*defect.lines, *called_from([defect])[:1])]
    # Columns fold, because a line that is cut off has no number: the reference's first, the candidate's last.
    place = max(min(max(map(len, lines), default=0), _PLACE, width - _FRAME - 2 * _NARROW), _NARROW)
    change = min(max(len(_change(group[0])) for _, group in groups), _CHANGE)
    table.add_column("candidate", overflow="fold", min_width=place)
    table.add_column(repair, overflow="fold")
    table.add_column("reference", overflow="fold", max_width=max(width - _FRAME - place - change, _NARROW))
    table.add_column("error", justify="right", no_wrap=True)
    for number, group in groups:
        first = group[0]
        times = f"\n{len(group)} times" if len(group) > 1 else ""
        callers = called_from(group)
        place = _shortened(first.lines) + times + (f"\ncalled from\n{callers[0]}" if callers else "")
        reference = _shortened(places(first.reference) or list(dict.fromkeys(o.name for o in first.reference)))
        error = max(defect.error for defect in group)
        table.add_row(number, *(escape(text) for text in (place, _change(first), reference)), f"{error:.1g}")
    return table


def _change(defect: Defect) -> str:
    return defect.note or (str(defect.repair) if defect.repair is not None else "none found")


def _shortened(lines: Sequence[str]) -> str:
    return "\n".join(lines[:_MOST]) + (f"\nand {len(lines) - _MOST} more" if len(lines) > _MOST else "")
