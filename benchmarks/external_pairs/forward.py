"""Defects in operations and parameters, false alarms of correct pairs, and what other criteria let through."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from benchmarks.external_pairs.defects import sites
from benchmarks.external_pairs.pair import Pair
from benchmarks.external_pairs.planting import Planted, Site
from benchmarks.external_pairs.scores import ERROR, Score, by_operator, report, sample
from twinax.compare.capture.models import capture
from twinax.compare.capture.trace import Trace
from twinax.compare.repair.diagnosis import Diagnosis, diagnose_traces
from twinax.compare.training.gradients import diagnose_gradients

TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5)
CRITERIA = (*(f"atol {t:.0e}" for t in TOLERANCES), "KL 0.015", "cosine 0.999")


@dataclass(frozen=True)
class Checked:
    """A pair that was compared, and the places for defects by operator."""

    pair: Pair
    traces: tuple[Trace, Trace]
    diagnosis: Diagnosis
    sites: Mapping[str, list[Site]]

    @property
    def inputs(self) -> tuple[Sequence[object], Sequence[object]]:
        """Of the reference and of the candidate."""
        return self.pair.inputs, self.pair.candidate_inputs or self.pair.inputs


def passed_criteria(reference: Trace, planted: Trace) -> tuple[str, ...]:
    """The criteria of other projects that the planted outputs satisfy, in float32."""
    passing = set(CRITERIA)
    for name, number in planted.outputs.items():
        one = reference.values[reference.outputs[name]].astype(np.float32)
        other = planted.values[number].astype(np.float32)
        error = float(np.abs(one - other).max())
        passing -= {f"atol {t:.0e}" for t in TOLERANCES if error > t}
        logs = [special.log_softmax(array.astype(np.float64), -1) for array in (one, other)]
        if (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).max() >= 0.015:
            passing.discard("KL 0.015")
        wide = [array.astype(np.float64).ravel() for array in (one, other)]
        if wide[0] @ wide[1] <= 0.999 * np.linalg.norm(wide[0]) * np.linalg.norm(wide[1]):
            passing.discard("cosine 0.999")
    return tuple(criterion for criterion in CRITERIA if criterion in passing)


def false_alarms(builders: Mapping[str, Callable[[], Pair]]) -> tuple[dict[str, Checked], list[tuple[str, ...]]]:
    """(pairs that can be built, rows of all pairs with the verdicts on their outputs and gradients)."""
    checked: dict[str, Checked] = {}
    rows = []
    for name, build in builders.items():
        try:
            pair = build()
        except ImportError as error:
            ERROR.print(f"[bold red]LEFT OUT: {name}: {error}")
            rows.append((name, "", "", f"left out: {error}", "", ""))
            continue
        start = time.perf_counter()
        inputs = pair.inputs, pair.candidate_inputs or pair.inputs
        traces = capture(pair.reference, inputs[0]), capture(pair.candidate, inputs[1])
        diagnosis = diagnose_traces(*traces)
        assert diagnosis.weights is not None
        gradients = None
        if diagnosis.ok:
            gradients = diagnose_gradients((pair.reference, pair.candidate), inputs, traces, diagnosis)
        seconds = time.perf_counter() - start
        groups = by_operator(list(sites(traces[1])), lambda site: site.operator)
        checked[name] = Checked(pair, traces, diagnosis, groups)
        count, verdicts = sum(map(len, groups.values())), (diagnosis.verdict, gradients.verdict if gradients else "")
        rows.append((name, str(len(traces[1].operations)), str(count), *verdicts, f"{seconds:.1f}"))
        ERROR.print(*rows[-1], sep="; ")
        if gradients is None or not gradients.ok:
            ERROR.print(f"[bold red]FALSE ALARM: {diagnosis} {gradients}")
    return checked, rows


def measure(checked: Mapping[str, Checked], seed: int, count: int) -> list[Score]:
    """The score of each sampled defect."""
    scores = []
    for name, site, planted in sample({n: entry.sites for n, entry in checked.items()}, seed, count):
        assert isinstance(planted, Planted)
        start = time.perf_counter()
        reference, candidate = checked[name].traces
        diagnosis = diagnose_traces(reference, planted.trace)
        seconds = time.perf_counter() - start
        scores.append(_score(name, site, planted, diagnosis, seconds, passed_criteria(candidate, planted.trace)))
        report(len(scores), scores[-1], str(diagnosis))
    return scores


def _score(
    name: str, site: Site, planted: Planted, diagnosis: Diagnosis, seconds: float, passed: tuple[str, ...]
) -> Score:
    is_first = is_inside = False
    first = next(iter(diagnosis.defects), None)
    if first is not None:
        if planted.parameters:
            is_first = first.repair is not None and first.repair.parameter in planted.parameters
        else:
            is_first = first.lines[:1] == (planted.line,)
        numbers = {planted.trace.parameters[parameter] for parameter in planted.parameters}
        inputs = {n for operation in first.candidate for n in operation.inputs}
        lines = {operation.line or operation.module for operation in first.candidate}
        is_inside = is_first or planted.line in lines or not numbers.isdisjoint(inputs)
    return Score(
        name,
        site.operator,
        site.detail,
        planted.line or ", ".join(planted.parameters),
        diagnosis.verdict == "different",
        is_first,
        is_inside,
        first is not None and first.repair is not None,
        len(diagnosis.defects) == 1,
        str(first or diagnosis.verdict),
        seconds,
        passed,
    )


def published(builders: Mapping[str, Callable[[], Pair]]) -> list[tuple[str, ...]]:
    """Rows of the defects that other projects published: in outputs, and in gradients once the outputs are repaired."""
    rows = []
    for name, build in builders.items():
        pair = build()
        inputs = pair.inputs, pair.candidate_inputs or pair.inputs
        traces = capture(pair.reference, inputs[0]), capture(pair.candidate, inputs[1])
        diagnosis = diagnose_traces(*traces)
        assert diagnosis.weights is not None
        if diagnosis.ok:
            diagnosis = diagnose_gradients((pair.reference, pair.candidate), inputs, traces, diagnosis)
        for defect in diagnosis.defects:
            rows.append((name, ", ".join(defect.lines), str(defect.repair or defect.note or "none found")))
        if not diagnosis.defects:
            rows.append((name, f"NOT FOUND: {diagnosis.verdict}", ""))
    return rows
