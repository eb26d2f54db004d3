"""A comparison as one HTML page, which needs no other file and no script."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..backend.page import render
from .capture.source_lines import Snippet, snippets
from .capture.trace import Operation, Trace
from .comparison import Comparison
from .matching.alignment import Difference, Row, side_by_side
from .matching.matching import EXACT, ROUNDED, output_pairs, producers
from .matching.uses import USE
from .repair.defect import Defect
from .report import called_from, expressions, grouped, modules

_TRIED = {
    True: "after all repairs, computed from the inputs on, the outputs agree",
    False: "the change was tried and makes this value equal; the outputs were not shown to agree after it",
}
_MARKS = {"equal": "=", "different": "≠", "unmatched": "·"}
_NOTHING = "not compared"
_CONTEXT = 2  # rows around a difference that are open
_FEW = 60  # rows that are all open
_SECTIONS = 24  # into which rows are folded at most, beyond those that differences divide
_DEPTH = 6  # of module paths
_MEANINGS = {
    "equal": f"All outputs agree to {EXACT:.0e} in float64 on these inputs.",
    "equal but for float32 constants": f"All outputs agree to {ROUNDED:.0e} in float64 on these inputs. The rest "
    "comes from constants that one model has rounded to float32.",
    "different": "The outputs differ in float64 on these inputs. After each difference, the candidate continued with "
    "the reference's value, so later differences do not depend on earlier ones.",
    "undecided": "The models cannot be compared.",
    "gradients different": "The outputs agree, but the gradients do not.",
    "gradients undecided": "The outputs agree; the gradients cannot be compared.",
    "optimizers different": "The outputs agree, but the optimizers update the parameters differently.",
    "different in rounding": "The outputs agree in float64, but in a narrower dtype the candidate's errors are larger "
    "than the order of its operations explains.",
}


@dataclass(frozen=True)
class _Difference:
    """Defects with the same lines and the same repair."""

    number: int
    part: str
    group: Sequence[Defect]
    in_outputs: bool
    tried: str  # what is known of the repair


@dataclass(frozen=True)
class _Section:
    """Consecutive rows of the traces, of one module."""

    title: str
    open: bool
    rows: Sequence[Row]

    @property
    def counts(self) -> str:
        """How many rows have equal values, differences, and values of one model only."""
        marks = [{cell.mark for cell in row if cell is not None} for row in self.rows]
        equal = sum("equal" in row and "different" not in row for row in marks)
        different = sum("different" in row for row in marks)
        counts = {"equal": equal, "different": different, "of one model only": len(marks) - equal - different}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def page(comparison: Comparison, names: tuple[str, str]) -> str:
    """The page; `names` of the reference and of the candidate."""
    weights = comparison.forward.weights
    numbered = list(_differences(comparison))
    return render(
        "compare/page.html",
        ("compare/differences.css", "compare/page.css"),
        comparison=comparison,
        names=names,
        meaning=_MEANINGS[comparison.verdict],
        marks=_MARKS,
        parts=list(_parts(comparison)),
        defects=differences(comparison),
        traces=comparison.traces,
        operations=[len(trace.operations) for trace in comparison.traces],
        sections=list(_sections(_rows(comparison, numbered))),
        weights=list(_weights(comparison)),
        unused=weights.unused if weights is not None else (),
        tied=weights.ties if weights is not None else {},
        not_tested=comparison.coverage_gaps,
        seconds=comparison.seconds,
        numbers=_numbers,
        shapes=_shapes,
    )


def differences(comparison: Comparison) -> list[dict[str, Any]]:
    """The differences as `compare/differences.html` shows them."""
    return [_defect(difference, comparison.traces) for difference in _differences(comparison)]


def _parts(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """The table of what was compared."""
    forward = comparison.forward
    matched, total = forward.matched
    details = [f"{matched} of the reference's {total} values occur in the candidate"] if total else []
    details += [f"output {sentence}" for sentence in forward.rearranged]
    yield _part("outputs", forward.verdict, forward.ok, details, forward.reason)
    backward = comparison.backward
    if backward is None:
        yield _part("gradients", _NOTHING, None)
    else:
        yield _part("gradients", backward.verdict, backward.ok, [], backward.reason)
    update = comparison.update
    result = _NOTHING if update is None else "different" if update else "equal"
    yield _part("optimizer", result, None if update is None else not update, list(map(str, update or ())))
    for entry in comparison.rounding:
        errors = f"errors {entry.reference:.1e} and {entry.candidate:.1e} over {entry.inputs} inputs, ratio "
        details = [entry.failure or f"{errors}{entry.ratio:.2f}"]
        details += [f"because of {cast}" for cast in entry.casts]
        result = "not measured" if entry.failure else "rounding only" if entry.ok else "more than rounding"
        yield _part(entry.dtype, result, None if entry.failure else entry.ok, details)
    if not comparison.rounding:
        yield _part("rounding", _NOTHING, None)


def _part(title: str, result: str, ok: bool | None, details: Sequence[str] = (), reason: str = "") -> dict[str, Any]:
    mark = "unmatched" if ok is None or result == "undecided" else "equal" if ok else "different"
    return {"title": title, "result": result, "mark": mark, "details": details, "reason": reason}


def _differences(comparison: Comparison) -> Iterator[_Difference]:
    number = 0
    for name, diagnosis in (("outputs", comparison.forward), ("gradients", comparison.backward)):
        parts = ((name, diagnosis.defects), (f"{name}, float32 constant", diagnosis.roundings)) if diagnosis else ()
        for part, defects in parts:
            for group in grouped(defects):
                number += 1
                tried = _TRIED[diagnosis is not None and diagnosis.verified]
                yield _Difference(number, part, group, diagnosis is comparison.forward, tried)


def _defect(difference: _Difference, traces: Sequence[Trace]) -> dict[str, Any]:
    group = difference.group
    first = group[0]
    places = list(dict.fromkeys(o.module for defect in group for o in defect.reference if o.module))
    lines = [operation.line for operation in first.reference]
    sides = zip(traces, (first.reference, first.candidate), strict=True)
    # the values of a backward pass have other numbers than those of these traces
    parameters = [list(_parameters(*side)) if difference.in_outputs else [] for side in sides]
    return {
        "number": difference.number,
        "part": difference.part,
        "repair": first.note or (str(first.repair) if first.repair is not None else "no repair found"),
        "tried": difference.tried if first.repair is not None else "",
        "occurrences": len(group),
        "error": max(defect.error for defect in group),
        "called_from": called_from(group),
        "candidate": _side(parameters[1], first.candidate, first.lines, modules(group)),
        "reference": _side(parameters[0], first.reference, lines, places),
    }


def _side(
    parameters: Sequence[str], operations: Sequence[Operation], lines: Sequence[str], places: Sequence[str]
) -> tuple[list[str], list[str], Sequence[str], Sequence[str], list[Snippet]]:
    """(operations, lines, modules, parameters, source code)."""
    names = dict.fromkeys(o.name + _numbers(o) for o in operations if o.name != USE)
    known = [line for line in dict.fromkeys(lines) if line and line not in places]  # else it is a module's path
    return list(names), known, places, parameters, snippets(known)


def _parameters(trace: Trace, operations: Sequence[Operation]) -> Iterator[str]:
    """Names of the parameters that enter these operations, as they are or transposed before."""
    names = {number: name for name, number in trace.parameters.items()}
    made = producers(trace)
    for number in dict.fromkeys(number for operation in operations for number in operation.inputs):
        while number in made and len(made[number].inputs) == 1 and number not in names:
            (number,) = made[number].inputs
        if number in names:
            yield names[number]


def _rows(comparison: Comparison, differences: Sequence[_Difference]) -> list[Row]:
    forward, (reference, candidate) = comparison.forward, comparison.traces
    if forward.pairing is None:
        return []
    sides = [
        Difference(entry.number, d.reference, d.candidate, d.repair.operation if d.repair is not None else None)
        for entry in differences
        if entry.in_outputs
        for d in entry.group
    ]
    equal = forward.pairing.equal
    differing = [
        other
        for one, other in output_pairs(reference, candidate)
        if forward.reason and reference.outputs[one] not in equal.get(candidate.outputs[other], ())
    ]
    return side_by_side((reference, candidate), forward.pairing, sides, differing)


def _sections(rows: Sequence[Row]) -> Iterator[_Section]:
    """Rows near a difference open, the others folded by module."""
    different = {i for i, row in enumerate(rows) if any(c is not None and c.mark == "different" for c in row)}
    near = {i for place in different for i in range(place - _CONTEXT, place + _CONTEXT + 1)}
    paths = list(_module_paths(rows))
    most = _SECTIONS + 2 * sum(place + 1 not in near for place in near)

    def divided(depth: int) -> list[list[int]]:
        keys = ((i in near, () if i in near else paths[i][:depth]) for i in range(len(rows)))
        return [[i for i, _ in group] for _, group in groupby(enumerate(keys), lambda entry: entry[1])]

    if 0 < len(rows) <= _FEW:
        yield _Section("all operations", True, rows)
        return
    depth = next((d for d in range(_DEPTH, 0, -1) if len(divided(d)) <= most), 0)
    for numbers in divided(depth):
        first, last = (".".join(paths[numbers[end]][: depth or 1]) for end in (0, -1))
        yield _Section(first if first == last else f"{first} … {last}", numbers[0] in near, [rows[i] for i in numbers])


def _module_paths(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The module of each row, in the reference where that has an operation; else that of the row before."""
    path: list[str] = []
    for one, other in rows:
        cell = one or other
        if cell is not None and cell.operation.module and (one is not None or not path):
            path = cell.operation.module.split(".")
        yield path


def _weights(comparison: Comparison) -> Iterator[dict[str, Any]]:
    weights, traces = comparison.forward.weights, comparison.traces
    if weights is None:
        return
    texts = {name: ("", expressions(match, traces[0])) for name, match in weights.matches.items()}
    texts |= {name: ("ambiguous:", list(sources)) for name, sources in weights.ambiguous.items()}
    texts |= {name: ("unmatched: the reference has no such values", []) for name in weights.unmatched}
    for name, number in traces[1].parameters.items():
        if name in texts:
            status, sources = texts[name]
            yield {"name": name, "shape": _shape(traces[1], number), "status": status, "sources": sources}


def _numbers(operation: Operation) -> str:
    """The numbers among the settings of an operation, in brackets: literals, an epsilon, an exponent."""
    texts = []
    for name, value in operation.settings.items():
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            texts.append(f"{value:.6g}" if name.isdigit() else f"{name}={value:.6g}")
    return f" ({', '.join(texts)})" if texts else ""


def _shapes(trace: Trace, operation: Operation) -> str:
    return "; ".join(_shape(trace, number) for number in operation.outputs[:2])


def _shape(trace: Trace, number: int) -> str:
    value = trace.values[number]
    text = "×".join(map(str, value.shape)) or "scalar"
    return text if value.dtype == np.float64 else f"{text} {value.dtype}"
