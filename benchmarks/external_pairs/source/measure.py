"""Measures the diagnosis on mistakes in the source of other projects' ports, by kinds in turn.

`python -m benchmarks.external_pairs.source.measure PAGE PAIRS` writes the tables into the page; PAIRS is the folder
with the projects. `--seed`, `--count` and `--words` choose other mistakes and ports; then nothing is written.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.external_pairs.pair import Pair
from benchmarks.external_pairs.source.mistakes import Mistake, mistakes
from benchmarks.external_pairs.source.ports import PORTS
from benchmarks.external_pairs.source.ports.port import Port, imported_from
from benchmarks.pages import write_between, write_table
from twinax.compare.capture.models import capture
from twinax.compare.capture.trace import Trace
from twinax.compare.matching.matching import EXACT, same_order, with_common_outputs
from twinax.compare.repair.diagnosis import diagnose_traces

SEED = 1
COUNT = 6  # mistakes per port
NONE = "none"
_ERROR = Console(stderr=True)


@dataclass(frozen=True)
class Result:
    """What the diagnosis says about one mistake, or about the correct port if there is none."""

    port: str
    mistake: str
    verdict: str
    named: tuple[str, ...] = ()  # the lines of the first difference, in order
    is_first: bool = False
    is_inside: bool = False
    repair: str = ""
    differences: int = 0
    seconds: float = 0.0
    megabytes: float = 0.0
    text: str = ""


def diagnosed(name: str, folder: Path, seed: int, count: int) -> Iterator[Result]:
    """The result for a correct port, then for mistakes of a sample that have an effect and do not raise."""
    port = PORTS[name]
    with tempfile.TemporaryDirectory() as place:
        original, copy = (Path(place, name, port.project) for name in ("original", "copy"))
        port.copy(folder, original)
        shutil.copytree(original, copy)
        with imported_from(copy, port.packages):
            pair = _built(port, copy)
            inputs = pair.candidate_inputs or pair.inputs
            reference, correct = capture(pair.reference, pair.inputs), capture(pair.candidate, inputs)
        yield _result(name, None, reference, correct)
        planted = (_planted(port, copy, mistake, inputs) for mistake in sample(port, original, seed))
        wrong = ((m, trace) for m, trace in planted if trace is not None and not _same_outputs(correct, trace))
        for mistake, trace in islice(wrong, count):
            yield _result(name, mistake, reference, trace)


def _built(port: Port, folder: Path) -> Pair:
    """The pair of a port; each time with the same parameters and buffers, which some modules draw as they are made."""
    import torch

    torch.manual_seed(0)
    return port.build(folder)


def _planted(port: Port, folder: Path, mistake: Mistake, inputs: Sequence[object]) -> tuple[Mistake, Trace | None]:
    """The trace of a port with a mistake; None if its code raises: then nobody needs a comparison."""
    mistake.apply(folder / port.file)
    try:
        with imported_from(folder, port.packages):
            return mistake, capture(_built(port, folder).candidate, inputs)
    except Exception:
        return mistake, None


def _same_outputs(one: Trace, other: Trace) -> bool:
    """Whether no output differs beyond rounding, or one has another shape or no number, as all see at once."""
    if one.outputs.keys() != other.outputs.keys():  # such as statistics that are updated in training mode
        return False
    pairs = [(one.values[one.outputs[name]], other.values[i]) for name, i in other.outputs.items()]
    if any(a.shape != b.shape or not np.isfinite(b).any() for a, b in pairs):
        return True
    return all(same_order(a, b, EXACT) for a, b in pairs)


def _result(name: str, mistake: Mistake | None, reference: Trace, candidate: Trace) -> Result:
    start = time.perf_counter()
    found = diagnose_traces(*with_common_outputs((reference, candidate))[0])
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    first = next(iter(found.defects), None)
    result = Result(name, str(mistake or NONE), found.verdict, seconds=seconds, megabytes=memory)
    if first is None:
        return replace(result, text=found.reason)
    places = set() if mistake is None else _places(mistake, candidate)
    inside = {line for operation in first.candidate for line in operation.lines}
    return replace(
        result,
        named=first.lines,
        is_first=not places.isdisjoint(first.lines[:1]),
        is_inside=not places.isdisjoint(inside) or not places.isdisjoint(first.lines),
        repair=str(first.repair or ""),
        differences=len(found.defects),
        text=str(first),
    )


def _places(mistake: Mistake, trace: Trace) -> set[str]:
    """The lines of a mistake; if it left no operation there, the next line that has one, and the one before."""
    file = f"{mistake.file.parent.name}/{mistake.file.name}"
    executed = {line for operation in trace.operations for line in operation.lines if line.startswith(f"{file}:")}
    own = {f"{file}:{number}" for number in mistake.lines}
    if own.isdisjoint(executed):
        numbers = sorted(int(line.rpartition(":")[2]) for line in executed)
        near = [n for n in numbers if n > mistake.lines[-1]][:1] + [n for n in numbers if n < mistake.lines[0]][-1:]
        own |= {f"{file}:{number}" for number in near}
    return own


def sample(port: Port, folder: Path, seed: int) -> Iterator[Mistake]:
    """The mistakes of a port in random order, its kinds in turn."""
    rng = np.random.default_rng(seed)
    kinds: dict[str, list[Mistake]] = {}
    found = list(mistakes(folder / port.file, port.functions))
    for i in rng.permutation(len(found)):
        kinds.setdefault(found[i].kind, []).append(found[i])
    while kinds:
        for kind in [[*kinds][i] for i in rng.permutation(len(kinds))]:
            yield kinds[kind].pop()
            if not kinds[kind]:
                del kinds[kind]


def _worker(name: str, folder: Path, seed: int, count: int, answers: Any) -> None:
    import torch

    torch.set_num_threads(1)
    with answers:
        for result in diagnosed(name, folder, seed, count):
            answers.send(result)


def run(folder: Path, names: Sequence[str], seed: int, count: int) -> list[Result]:
    """The results of the correct ports and of so many mistakes in each; as many ports at once as there are cores."""
    with ThreadPool(os.cpu_count()) as pool:
        return [
            result for port in pool.imap(lambda name: _run_port(name, folder, seed, count), names) for result in port
        ]


def _run_port(name: str, folder: Path, seed: int, count: int) -> list[Result]:
    """The results of one port, from a process of its own, whose memory is counted."""
    results: list[Result] = []
    context = multiprocessing.get_context("spawn")
    receiver, answers = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(name, folder, seed, count, answers))
    process.start()
    answers.close()
    with suppress(EOFError):
        while True:
            results.append(receiver.recv())
            _report(results[-1])
    process.join()
    if process.exitcode:
        results.append(Result(name, NONE, f"broken off: the process ended with {process.exitcode}"))
        _report(results[-1])
    return results


def _report(result: Result) -> None:
    mark = "first" if result.is_first else "inside" if result.is_inside else "MISSED"
    mark = result.verdict if result.mistake == NONE else mark
    line = f"{result.port}: {result.mistake}: {mark}, {result.differences} differences, {result.seconds:.1f} s"
    _ERROR.print(line, markup=False, highlight=False, soft_wrap=True)
    if result.mistake != NONE and not result.is_first:
        line = f"    {result.verdict}: {result.text[:400]}"
        _ERROR.print(line, markup=False, highlight=False, soft_wrap=True)


HEADER = ("port", "mistakes", "found", "named first", "in the region", "repair printed", "median s", "longest s", "MB")


def table(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row per port, then one for all."""
    planted = [result for result in results if result.mistake != NONE]
    groups = {name: [r for r in planted if r.port == name] for name in dict.fromkeys(r.port for r in planted)}
    groups["all"] = planted
    rows = []
    for name, group in groups.items():
        if group:
            fields = ((r.differences, r.is_first, r.is_inside, r.repair) for r in group)
            counts = [sum(map(bool, values)) for values in zip(*fields, strict=True)]
            seconds = [result.seconds for result in group]
            times = f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
            memory = f"{max(result.megabytes for result in group):.0f}"
            rows.append((name, *map(str, (len(group), *counts)), *times, memory))
    return rows


def main() -> int:
    """Print the table, and write it into the page unless another sample was chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--words", nargs="*", default=[])
    options = parser.parse_args()
    names = [name for name in PORTS if not options.words or any(word in name for word in options.words)]
    results = run(options.pairs, names, options.seed, options.count)
    rows = table(results)
    verdicts = {r.port: r.verdict for r in results if r.mistake == NONE}  # of correct ports, or how their process ended
    summary = (
        f"{sum(v.startswith('equal') for v in verdicts.values())} of {len(verdicts)} correct ports are called equal."
    )
    summary += "".join(f" {port}: {v}." for port, v in verdicts.items() if not v.startswith("equal"))
    missed = [
        (r.port, ": ".join(r.mistake.split(": ")[:2]), r.verdict, ", ".join(r.named[:3]), r.repair)  # without code
        for r in results
        if r.mistake != NONE and not r.is_first
    ]
    if options.words or (options.seed, options.count) != (SEED, COUNT):
        print(*("; ".join(row) for row in (HEADER, *rows)), summary, sep="\n")
        return 0
    write_table(options.page, "source-mistakes", HEADER, rows)
    write_table(options.page, "source-mistakes-missed", ("port", "mistake", "verdict", "named first", "repair"), missed)
    write_between(options.page, "source-mistakes-summary", summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
