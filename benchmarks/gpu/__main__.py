"""Measures a GPU or TPU into the tables of a page: `python -m benchmarks.gpu [--budget SECONDS] PAGE [PART ...]`.

Parts run in the order of their importance, each in processes of its own. The page, and PAGE's .json beside it, are
written after every part. Parts that no longer fit into the budget are skipped. The next call measures them, and again
those that lack rows because a program failed. PART: only these, measured anew. `--small` measures tiny models on any
device, prints the tables and writes nothing. The exit status is 1 if a program failed or a row does not hold.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import correctness, profile, training
from benchmarks.gpu.scale import LENGTH, SCALES, Scale
from benchmarks.pages import markdown, marks, write_atomically, write_between
from benchmarks.performance import decoding as programs
from twinax.backend.xla_flags import fast_compilation, set_xla_flags

Rows = list[list[str]]
POLL = 0.2  # seconds
STOPPED: list[int] = []  # the signals received
TOGETHER = 5  # processes that compute on the CPU at once
# Of compiled programs: empty for every part, so that each measures the time of compilation.
CACHES = ("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
VERSIONS = ("jax", "flax", "torch", "transformers", "numpy")
NO_BUDGET = "the budget was used up"
NOT_YET = "Not measured: neither a GPU nor a TPU has run this benchmark yet."


class Part(NamedTuple):
    """A table."""

    name: str
    measure: Callable[[Scale], Rows]
    title: str
    header: tuple[str, ...]
    seconds: float  # that it needs on an H200, without which it is not begun
    together: bool = False  # whether it may run beside others, because it measures no time
    expected: tuple[tuple[str, ...], ...] = ()  # the first cells of rows that a failing program leaves out


def device(_: Scale) -> Rows:
    """The device, its driver, and the versions of what computes on it: one row."""
    import jax

    first = jax.devices()[0]
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True)
        driver = answer.stdout.partition("\n")[0] if answer.returncode == 0 else ""
    return [[first.platform, first.device_kind, driver, " ".join(first.client.platform_version.split())]]


def decoding(scale: Scale) -> Rows:
    """One row per beam size and program."""
    from benchmarks.alternating import spread

    rows = []
    names = programs.ON_GPU[: scale.decoders]
    for row in programs.compare(scale.beams, scale.rounds, names, scale.layers, together=True):
        for name, seconds in row.seconds.items():
            milliseconds = f"{1000 * statistics.median(seconds):,.0f}"
            ratio = spread(seconds, row.seconds[programs.TWINAX]) if programs.TWINAX in row.seconds else ""
            equal = f"{row.equal[name]} of {programs.SENTENCES}" if name in row.equal else ""
            rows.append([str(row.beam_size), name, milliseconds, ratio, equal, row.devices[name]])
    return rows


def train(name: str, title: str, model: int, chosen: Sequence[tuple[str, int]], seconds: float) -> Part:
    """The training of one of the full scale's models in these programs: (name, which of the numbers of sentences)."""
    full = SCALES["full"]
    expected = tuple((full.trained[model].label, str(full.sentences[i]), program) for program, i in chosen)
    measure = partial(training.train, model=model, programs=chosen)
    return Part(name, measure, title, TRAINING, seconds, expected=expected)


DEVICE = Part("device", device, "", (), 0)
TRAINING = ("model", "pairs", "program", "ms / update", "times as fast as compiled PyTorch in bfloat16")
TRAINING += ("target tokens / s", "GB", "first update, s", "MFU")
PARTS = (
    Part(
        "ladder",
        correctness.ladder,
        "The ladder of the preset `small`, Flax on this device and PyTorch on the CPU",
        ("rung", "float64 difference", "float32 ratio", "bfloat16 ratio", "holds"),
        190,
        together=True,
    ),
    Part(
        "updates",
        correctness.updates,
        f"{correctness.UPDATES} updates with dropout in float64, Flax on this device and PyTorch on the CPU",
        ("training", "loss", "parameters", "handover", "float32 ratio", "resumed bit-exactly", "holds"),
        310,
        together=True,
    ),
    Part(
        "comparison",
        correctness.comparison,
        "`twinax.parity.compare` of the twins, one setting of the Flax twin wrong",
        ("planted", "verdict", "first finding"),
        310,
        together=True,
    ),
    Part(
        "resume",
        correctness.resume,
        "A training in bfloat16, stopped halfway and resumed in another process",
        ("deterministic", "updates", "state without a stop", "resumed", "equal"),
        310,
        together=True,
    ),
    Part(
        "attention",
        correctness.attention,
        "Attention in bfloat16, against PyTorch in float64",
        ("error", "exact", "fused", "fused / exact"),
        310,
        together=True,
    ),
    train("base", f"Training, {LENGTH} tokens per side", 0, training.MAIN, 90),
    train("big", "Training of the larger model", 1, training.MAIN, 120),
    Part(
        "operations",
        profile.operations,
        "Operations of a training step, base model, bfloat16, exact attention",
        ("operation", "number", "milliseconds", "time"),
        80,
    ),
    Part(
        "plan",
        profile.plan,
        "`twinax plan` beside the device, base model, bfloat16, exact attention",
        (
            *("bound, ms", "measured, ms", "GB, estimated", "GB, compiled"),
            *("GB moved, estimated", "GB moved, by XLA", "of the bandwidth"),
        ),
        90,
    ),
    Part(
        "decoding",
        decoding,
        "Decoding of 32 sentences, 40 tokens each",
        ("beam", "program", "milliseconds", "time / that of twinax in float32", "as transformers in float32", "device"),
        100,
        expected=tuple((str(beam), name) for beam in SCALES["full"].beams for name in programs.ON_GPU),
    ),
    Part(
        "products",
        correctness.products,
        f"A product of two square matrices of {SCALES['full'].product:,} rows",
        ("computed by", "TFLOP/s", "relative error"),
        30,
    ),
    *(
        train(
            f"{name}_further",
            f"Training of the {name} model with other dtypes, attention, flags and batches",
            model,
            (*chosen, *training.SMALLER),
            240,
        )
        for model, name, chosen in ((0, "base", training.OTHERS), (1, "big", training.FUSED_ONLY))
    ),
)


def main(arguments: argparse.Namespace) -> list[str]:
    """Measure all parts that the budget allows; return those that failed. This process does not use the device."""
    deadline = time.monotonic() + (float("inf") if arguments.budget is None else arguments.budget)
    scale = "small" if arguments.small else "full"
    page: Path | None = None if arguments.small else arguments.page
    path = page and page.with_suffix(".json")
    devices = read(path)
    if arguments.small:
        os.environ["XLA_FLAGS"] = f"{fast_compilation()} {os.environ.get('XLA_FLAGS', '')}".strip()
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // TOGETHER)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each of several processes
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the device's memory
    ((_, first),) = results([DEVICE], scale, deadline)
    if "rows" not in first:
        sys.exit(f"the device: {first['problem']}")
    ((platform, kind, driver, software),) = first["rows"]
    if page is not None and platform == "cpu":
        sys.exit("JAX sees no GPU or TPU here; `python -m benchmarks.gpu --small` tries this program on a CPU")
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    facts = f"{kind}{driver and f', driver {driver}'}, {software}; {versions}"
    print(facts, flush=True)
    done = devices.get(facts, {})
    parts = [part for part in PARTS if (part.name in arguments.parts or not arguments.parts)]
    parts = [part for part in parts if part.name in arguments.parts or missing(part, done.get(part.name, {}))]
    failed: list[str] = []
    for part, result in results(parts, scale, deadline):
        print(f"\n{section(part, result)}\n\n{part.name}: {result.get('seconds', 0)} s", flush=True)
        if page is not None and path is not None:
            devices = read(path)  # another call may have written meanwhile
            done = devices.setdefault(facts, {})
            if is_better(part, result, done.get(part.name, {})):
                done[part.name] = result
            write_atomically(path, json.dumps(devices, indent=1) + "\n")
            write_between(page, "gpu", text(devices))
        failed += [part.name] if has_failed(part, result, scale == "full") else []
    return failed


def has_failed(part: Part, result: Mapping[str, Any], is_full: bool) -> bool:
    """Whether a program of the part failed, or a row does not hold. What the budget ended has not failed."""
    if "rows" not in result:
        return NO_BUDGET not in result["problem"]
    is_false = any({training.FAILED, "NO"} & {*row} for row in result["rows"])
    return is_false or (is_full and bool(missing(part, {**result, "seconds": 0})))


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    """The results in a file, by device and part; none without a file."""
    try:
        return json.loads(path.read_text()) if path is not None and path.is_file() else {}
    except ValueError as error:
        sys.exit(f"{path}: is not JSON: {error}; repair it, or delete it to measure everything anew")


def missing(part: Part, result: Mapping[str, Any]) -> list[str]:
    """What a part's result lacks: rows, by their first cells, or its seconds; [] if it is complete."""
    if "rows" not in result:
        return ["all rows"]
    rows = [tuple(row) for row in result["rows"] if training.FAILED not in row]
    absent = [cells for cells in part.expected if not any(row[: len(cells)] == cells for row in rows)]
    return [" · ".join(cells) for cells in absent] + ([] if "seconds" in result else ["the part's duration"])


def is_better(part: Part, result: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a result replaces an older one: it does not lack more."""
    return "rows" not in old or ("rows" in result and len(missing(part, result)) <= len(missing(part, old)))


def results(parts: Sequence[Part], scale: str, deadline: float) -> Iterator[tuple[Part, dict[str, Any]]]:
    """(part, its rows or why there are none), as they come. Neighbours run at once if their times mean nothing."""
    for together, group in groupby(parts, lambda part: part.together or scale == "small"):
        waiting = list(group)
        while waiting:
            wave, waiting = (waiting, []) if together else (waiting[:1], waiting[1:])
            running: dict[Part, Process] = {}
            try:
                for part in wave:
                    if scale == "small" or time.monotonic() + part.seconds <= deadline:
                        running[part] = Process(part, scale)
                    else:
                        yield part, {"problem": f"skipped: {NO_BUDGET}"}
                while running:
                    if STOPPED:
                        sys.exit(128 + STOPPED[0])
                    part = next((part for part, process in running.items() if process.has_ended()), None)
                    if part is None and time.monotonic() < deadline:
                        time.sleep(POLL)
                        continue
                    part = part or next(iter(running))
                    yield part, running.pop(part).result()
            finally:  # the signals do not reach them
                for process in running.values():
                    process.result()


class Process:
    """A part in a process of its own: the next one has the whole device."""

    def __init__(self, part: Part, scale: str):
        self._begin = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._file = Path(self._folder.name, "rows.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, scale, str(self._file)]
        environment = os.environ | {name: str(Path(self._folder.name, name)) for name in CACHES}
        self._process = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr, env=environment)

    def has_ended(self) -> bool:
        """Whether the rows are written, or the process is over."""
        return self._file.exists() or self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Rows and seconds, or the problem; ends the process, and those that it started."""
        status = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        text = self._file.read_text() if self._file.exists() else ""
        self._folder.cleanup()
        problem = f"stopped: {NO_BUDGET}" if status is None else f"failed with exit status {status}"
        outcome = {"rows": json.loads(text)} if text else {"problem": problem}
        return {**outcome, "seconds": round(time.monotonic() - self._begin)}


def section(part: Part, result: Mapping[str, Any]) -> str:
    """The table of a part with its title."""
    body = markdown(part.header, result["rows"]) if "rows" in result else f"Not measured: {result['problem']}."
    return f"{part.title}:\n\n{body}"


def text(devices: Mapping[str, Mapping[str, Any]]) -> str:
    """What the page holds: one block per device, which ends with what was not measured there."""
    blocks = []
    for facts, done in devices.items():
        measured = [part for part in PARTS if "rows" in done.get(part.name, {})]
        absent = []
        for part in PARTS:
            result = done.get(part.name, {})
            reasons = missing(part, result) if part in measured else [result["problem"]] if result else []
            if part not in measured or reasons:
                absent.append(f"{part.name} ({'; '.join(reasons)})" if reasons else part.name)
        blocks += [f"{facts}.", *(section(part, done[part.name]) for part in measured)]
        blocks += ["Not measured on this device:\n\n" + "\n".join(f"- {entry}" for entry in absent)] if absent else []
    return "\n\n".join(blocks) or NOT_YET


def run_part(name: str, scale: str, path: str) -> None:
    """Measure a part in this process, and write its rows as JSON."""
    set_xla_flags()
    measured = {part.name: part.measure for part in (DEVICE, *PARTS)}[name](SCALES[scale])
    write_atomically(Path(path), json.dumps(measured))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        run_part(*sys.argv[2:])
        sys.exit()
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--budget", type=float, help="seconds; default: no limit")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("parts", nargs="*", help=", ".join(part.name for part in PARTS))
    given = parser.parse_args()
    if given.small and given.page is not None:
        given.page, given.parts = None, [str(given.page), *given.parts]
    if (given.page is None) != given.small:
        parser.error("give either PAGE or --small")
    if unknown := set(given.parts) - {part.name for part in PARTS}:
        parser.error(f"{min(unknown)}: no part; parts: {', '.join(part.name for part in PARTS)}")
    # No exception: raised while a part's process begins, it would leave that process running.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: STOPPED.append(number))
    try:
        if given.page is not None:
            marks(given.page, "gpu")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if failed := main(given):
        sys.exit(f"failed, or does not hold: {', '.join(failed)}")
