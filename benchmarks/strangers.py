"""Measures the diagnosis: planted defects found in pairs of models, false alarms, and what other criteria let through.

`python -m benchmarks.strangers PAGE PAIRS` writes the tables into the page; PAIRS is the folder with other projects'
models. `--seed` and `--count` choose other defects, `--words` pairs; then nothing is written.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from scipy import special

from benchmarks.pages import write_between, write_table
from benchmarks.strangers_defects import sites
from benchmarks.strangers_pair import Pair
from benchmarks.strangers_pairs import pairs, published_defects
from benchmarks.strangers_planting import Planted, Site
from twinax.parity.capture.trace import Trace
from twinax.parity.diagnosis import Diagnosis, capture, diagnose, diagnose_traces

SEED, COUNT = 20262, 60  # of the published sample; what is improved is improved on others
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5)
CRITERIA = (*(f"atol {t:.0e}" for t in TOLERANCES), "KL 0.015", "cosine 0.999")
_ERROR = Console(stderr=True)


@dataclass(frozen=True)
class Traces:
    """A pair's traces, and the places for defects by operator."""

    reference: Trace
    candidate: Trace
    sites: Mapping[str, list[Site]]


@dataclass(frozen=True)
class Score:
    """What became of a planted defect."""

    pair: str
    operator: str
    detail: str
    planted: Planted
    diagnosis: Diagnosis
    seconds: float
    passed: tuple[str, ...]  # criteria that let it through

    @property
    def detected(self) -> bool:
        """Whether the verdict is that the models differ."""
        return self.diagnosis.verdict == "different"

    @property
    def is_first(self) -> bool:
        """Whether the first defect's first line, or its parameter, is the planted one."""
        if not self.diagnosis.defects:
            return False
        first = self.diagnosis.defects[0]
        if self.planted.parameters:
            return first.repair is not None and first.repair.parameter in self.planted.parameters
        return first.lines[:1] == (self.planted.line,)

    @property
    def is_inside(self) -> bool:
        """Whether the first defect's operations have the planted line or parameter."""
        if not self.diagnosis.defects:
            return False
        first = self.diagnosis.defects[0]
        numbers = {self.planted.trace.parameters[name] for name in self.planted.parameters}
        inputs = {n for operation in first.candidate for n in operation.inputs}
        lines = {operation.line or operation.module for operation in first.candidate}
        return self.is_first or self.planted.line in lines or not numbers.isdisjoint(inputs)

    @property
    def is_repaired(self) -> bool:
        """Whether the first defect has a repair."""
        return bool(self.diagnosis.defects) and self.diagnosis.defects[0].repair is not None

    @property
    def is_alone(self) -> bool:
        """Whether nothing else is named as a defect."""
        return len(self.diagnosis.defects) == 1


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


def false_alarms(builders: Mapping[str, Callable[[], Pair]]) -> tuple[dict[str, Traces], list[tuple[str, ...]]]:
    """(traces of the pairs that can be built, rows of all pairs with their verdicts)."""
    traces: dict[str, Traces] = {}
    rows = []
    for name, build in builders.items():
        try:
            pair = build()
        except ImportError as error:
            _ERROR.print(f"[bold red]LEFT OUT: {name}: {error}")
            rows.append((name, f"left out: {error}", "", "", ""))
            continue
        start = time.perf_counter()
        reference = capture(pair.reference, pair.inputs)
        candidate = capture(pair.candidate, pair.candidate_inputs or pair.inputs)
        diagnosis = diagnose_traces(reference, candidate)
        seconds = time.perf_counter() - start
        by_operator: dict[str, list[Site]] = {}
        for site in sites(candidate):
            by_operator.setdefault(site.operator, []).append(site)
        traces[name] = Traces(reference, candidate, by_operator)
        count = sum(map(len, by_operator.values()))
        rows.append((name, str(len(candidate.operations)), str(count), diagnosis.verdict, f"{seconds:.1f}"))
        _ERROR.print(*rows[-1], sep="; ")
        if not diagnosis.ok:
            _ERROR.print(f"[bold red]FALSE ALARM: {diagnosis}")
    return traces, rows


def sample(traces: Mapping[str, Traces], seed: int, count: int) -> Iterator[tuple[str, Site, Planted]]:
    """Defects that change the outputs: operators in turn, each in the pair that has had the fewest."""
    rng = np.random.default_rng(seed)
    operators = sorted({operator for entry in traces.values() for operator in entry.sites})
    stock = {
        (name, operator): [sites[i] for i in rng.permutation(len(sites))]
        for name, entry in traces.items()
        for operator in operators
        if (sites := entry.sites.get(operator, []))
    }
    used: Counter[str] = Counter()
    drawn = 0
    while drawn < count and stock:
        for operator in [operators[i] for i in rng.permutation(len(operators))]:
            names = [name for name in traces if (name, operator) in stock]
            order = sorted(names, key=lambda name: (used[name], rng.random()))
            entry = next((e for name in order if (e := _next(name, stock, operator)) is not None), None)
            if entry is not None and drawn < count:
                used[entry[0]] += 1
                drawn += 1
                yield entry


def _next(name: str, stock: dict[tuple[str, str], list[Site]], operator: str) -> tuple[str, Site, Planted] | None:
    """The next site of a pair and an operator at which the defect can be planted."""
    remaining = stock[name, operator]
    while remaining:
        site = remaining.pop()
        try:
            planted = site.plant()
        except (ValueError, IndexError, TypeError, KeyError):
            continue  # the code would raise
        if planted is not None:
            return name, site, planted
    return None


def measure(traces: Mapping[str, Traces], seed: int, count: int) -> list[Score]:
    """The score of each sampled defect."""
    scores = []
    for name, site, planted in sample(traces, seed, count):
        start = time.perf_counter()
        diagnosis = diagnose_traces(traces[name].reference, planted.trace)
        seconds = time.perf_counter() - start
        passed = passed_criteria(traces[name].candidate, planted.trace)
        scores.append(Score(name, site.operator, site.detail, planted, diagnosis, seconds, passed))
        _report(len(scores), scores[-1])
    return scores


def _report(number: int, score: Score) -> None:
    """One line per defect; a miss with its diagnosis."""
    place = score.planted.line or ", ".join(score.planted.parameters)
    mark = "first" if score.is_first else "inside" if score.is_inside else "MISSED"
    text = f"{number}: {score.pair}: {score.operator} ({score.detail}) at {place}: {mark}, {score.seconds:.1f} s"
    _ERROR.print(text, markup=False, highlight=False, soft_wrap=True)
    if not score.is_first:
        _ERROR.print(f"    {str(score.diagnosis)[:1500]}", markup=False, highlight=False, soft_wrap=True)


def table(scores: Sequence[Score], key: Callable[[Score], str]) -> list[tuple[str, ...]]:
    """Rows of counts by operator or by pair, then of all."""
    groups: dict[str, list[Score]] = {}
    for score in sorted(scores, key=key):
        groups.setdefault(key(score), []).append(score)
    groups["all"] = list(scores)
    rows = []
    for name, group in groups.items():
        counts = [
            sum(getattr(score, field) for score in group)
            for field in ("detected", "is_first", "is_inside", "is_repaired", "is_alone")
        ]
        missed = [sum(criterion in score.passed for score in group) for criterion in CRITERIA]
        rows.append((name, *map(str, (len(group), *counts, *missed))))
    return rows


def published(builders: Mapping[str, Callable[[], Pair]]) -> list[tuple[str, ...]]:
    """Rows of the defects that other projects published."""
    rows = []
    for name, build in builders.items():
        try:
            pair = build()
        except ImportError as error:
            rows.append((name, f"left out: {error}", ""))
            continue
        diagnosis = diagnose(pair.reference, pair.candidate, pair.inputs, pair.candidate_inputs)
        for defect in diagnosis.defects:
            rows.append((name, ", ".join(defect.lines), str(defect.repair or "none found")))
        if not diagnosis.defects:
            rows.append((name, f"NOT FOUND: {diagnosis.verdict}", ""))
    return rows


def summary(scores: Sequence[Score], alarms: Sequence[Sequence[str]]) -> str:
    """The counts in words."""
    detected, first = (sum(getattr(score, field) for score in scores) for field in ("detected", "is_first"))
    forward = [score for score in scores if not score.planted.parameters]
    median, longest = (f([score.seconds for score in scores]) for f in (statistics.median, max))
    equal = sum(row[3].startswith("equal") for row in alarms)
    return (
        f"{detected} of {len(scores)} defects are found, {first} at the right line or parameter first "
        f"({sum(score.is_first for score in forward)} of the {len(forward)} in operations). A diagnosis takes "
        f"{median:.1f} s in the median, {longest:.0f} s at most. "
        f"{equal} of {len(alarms)} correct pairs are called equal."
    )


HEADER = ("defects", "found", "line first", "in the region", "repair named", "nothing else named", *CRITERIA)


def main() -> int:
    """Prints the tables, and writes them into the page unless another sample was chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--words", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    builders = pairs(options.pairs)
    builders = {n: b for n, b in builders.items() if not options.words or any(w in n for w in options.words)}
    traces, alarms = false_alarms(builders)
    scores = measure(traces, options.seed, options.count)
    is_final = options.seed == SEED and options.count == COUNT and not options.words
    page = options.page if is_final else None
    tables = {
        "strangers-operators": (("mistake", *HEADER), table(scores, lambda score: score.operator)),
        "strangers-pairs": (("pair", *HEADER), table(scores, lambda score: score.pair)),
        "strangers-alarms": (("pair", "operations", "places", "verdict", "seconds"), alarms),
    }
    if is_final:
        rows = published(published_defects(options.pairs))
        tables["strangers-published"] = (("model", "line", "repair"), rows)
    for name, (header, rows) in tables.items():
        if page is None:
            print(*("; ".join(row) for row in (header, *rows)), sep="\n", end="\n\n")
        else:
            write_table(page, name, header, rows)
    text = summary(scores, alarms)
    print(text)
    if page is not None:
        write_between(page, "strangers-summary", text)
    return 0 if all(score.detected for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
