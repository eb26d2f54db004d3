"""Measures a GPU or TPU into the tables of a page: `python -m benchmarks.gpu [--budget SECONDS] PAGE [PART ...]`.

Parts run in the order of their importance, each in processes of its own. The page, and PAGE's .gpu.json beside it, are
written after every part. Parts that no longer fit into the budget are skipped; the next call begins with them. PART:
only these, measured anew. `--small` measures tiny models on any device, prints the tables and writes nothing.
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
from benchmarks.pages import markdown, marks, write_between
from twinax.backend.xla_flags import fast_compilation, set_xla_flags

Rows = list[list[str]]
POLL = 0.2  # seconds
TOGETHER = 5  # processes that compute on the CPU at once
VERSIONS = ("jax", "flax", "torch", "transformers", "numpy")
NOT_YET = "Not measured: neither a GPU nor a TPU has run this benchmark yet."


class Part(NamedTuple):
    """A table."""

    name: str
    measure: Callable[[Scale], Rows]
    title: str
    header: tuple[str, ...]
    seconds: float  # that it needs on an H200, without which it is not begun
    together: bool = False  # whether it may run beside others, because it measures no time


def device(_: Scale) -> Rows:
    """The device, its driver, and the versions of what computes on it: one row."""
    import jax

    first = jax.devices()[0]
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    return [[first.platform, first.device_kind, driver, " ".join(first.client.platform_version.split())]]


def decoding(scale: Scale) -> Rows:
    """One row per beam size and program."""
    from benchmarks.alternating import spread
    from benchmarks.performance import decoding as programs

    rows = []
    names = programs.ON_GPU[: scale.decoders]
    for row in programs.compare(scale.beams, scale.rounds, names, scale.layers, together=True):
        for name, seconds in row.seconds.items():
            milliseconds = f"{1000 * statistics.median(seconds):,.0f}"
            ratio = spread(seconds, row.seconds[programs.TWINAX])
            equal = f"{row.equal[name]} of {programs.SENTENCES}"
            rows.append([str(row.beam_size), name, milliseconds, ratio, equal, row.devices[name]])
    return rows


DEVICE = Part("device", device, "", (), 0)
TRAINING = ("model", "pairs", "program", "ms / update", "times as fast as compiled PyTorch in bfloat16")
TRAINING += ("target tokens / s", "GB", "first update, s", "MFU")
PARTS = (
    Part(
        "ladder",
        correctness.ladder,
        "The ladder of the preset `small`, Flax on this device and PyTorch on the CPU",
        ("rung", "float64 difference", "float32 ratio", "bfloat16 ratio", "holds"),
        150,
        together=True,
    ),
    Part(
        "updates",
        correctness.updates,
        f"{correctness.UPDATES} updates with dropout in float64, Flax on this device and PyTorch on the CPU",
        ("training", "loss", "parameters", "relay", "float32 ratio", "resumed bit-exactly", "holds"),
        150,
        together=True,
    ),
    Part(
        "comparison",
        correctness.comparison,
        "`twinax.parity.compare` of the twins, one setting of the Flax twin wrong",
        ("planted", "verdict", "first finding"),
        150,
        together=True,
    ),
    Part(
        "resume",
        correctness.resume,
        "A training in bfloat16, stopped halfway and resumed in another process",
        ("deterministic", "updates", "state without a stop", "resumed", "equal"),
        150,
        together=True,
    ),
    Part(
        "attention",
        correctness.attention,
        "Attention in bfloat16, against PyTorch in float64",
        ("error", "exact", "fused", "fused / exact"),
        150,
        together=True,
    ),
    Part("base", partial(training.train, model=0), f"Training, {LENGTH} tokens per side", TRAINING, 90),
    Part("big", partial(training.train, model=1), "Training of the larger model", TRAINING, 120),
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
    ),
    Part(
        "products",
        correctness.products,
        f"A product of two square matrices of {SCALES['full'].product:,} rows",
        ("computed by", "TFLOP/s", "relative error"),
        30,
    ),
    *(
        Part(
            f"{name}_further",
            partial(training.train, model=model, programs=(*programs, *training.SMALLER)),
            f"Training of the {name} model with other dtypes, attention, flags and batches",
            TRAINING,
            240,
        )
        for model, name, programs in ((0, "base", training.OTHERS), (1, "big", training.FUSED_ONLY))
    ),
)


def main(arguments: argparse.Namespace) -> None:
    """Measure all parts that the budget allows. This process does not use the device."""
    deadline = time.monotonic() + (arguments.budget or float("inf"))
    scale = "small" if arguments.small else "full"
    page: Path | None = None if arguments.small else arguments.page
    path = page and page.with_suffix(".gpu.json")
    try:
        devices: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path and path.is_file() else {}
    except ValueError as error:
        sys.exit(f"{path}: is not JSON: {error}; repair it, or delete it to measure everything anew")
    if arguments.small:
        os.environ["XLA_FLAGS"] = f"{fast_compilation()} {os.environ.get('XLA_FLAGS', '')}".strip()
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
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
        done = devices.setdefault(facts, {})
        parts = [part for part in PARTS if (part.name in arguments.parts or not arguments.parts)]
        parts = [part for part in parts if part.name in arguments.parts or "rows" not in done.get(part.name, {})]
        for part, result in results(parts, scale, deadline):
            done[part.name] = result
            print(f"\n{section(part, result)}\n\n{part.name}: {result.get('seconds', 0)} s", flush=True)
            if page is not None and path is not None:
                path.write_text(json.dumps(devices, indent=1) + "\n")
                write_between(page, "gpu", text(devices))


def results(parts: Sequence[Part], scale: str, deadline: float) -> Iterator[tuple[Part, dict[str, Any]]]:
    """(part, its rows or why there are none), as they come. Neighbours run at once if their times mean nothing."""
    for together, group in groupby(parts, lambda part: part.together or scale == "small"):
        waiting = list(group)
        while waiting:
            wave, waiting = (waiting, []) if together else (waiting[:1], waiting[1:])
            running: dict[Part, Process] = {}
            for part in wave:
                if scale == "small" or time.monotonic() + part.seconds <= deadline:
                    running[part] = Process(part, scale)
                else:
                    yield part, {"problem": "skipped: the budget was used up"}
            try:
                while running:
                    part = next((part for part, process in running.items() if process.has_ended()), None)
                    if part is None and time.monotonic() < deadline:
                        time.sleep(POLL)
                        continue
                    part = part or next(iter(running))
                    yield part, running.pop(part).result()
            finally:  # Ctrl-C does not reach them
                for process in running.values():
                    process.result()


class Process:
    """A part in a process of its own: the next one has the whole device."""

    def __init__(self, part: Part, scale: str):
        self._begin = time.monotonic()
        self._file = Path(tempfile.mkstemp(suffix=".json")[1])
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, scale, str(self._file)]
        self._process = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr)

    def has_ended(self) -> bool:
        """Whether the process is over."""
        return self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Rows and seconds, or the problem; ends the process, and those that it started."""
        status = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        text = self._file.read_text()
        self._file.unlink()
        problem = "stopped: the budget was used up" if status is None else f"failed with exit status {status}"
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
        missing = [
            f"{part.name} ({done[part.name]['problem']})" if part.name in done else part.name
            for part in PARTS
            if part not in measured
        ]
        blocks += [f"{facts}.", *(section(part, done[part.name]) for part in measured)]
        blocks += [f"Not measured on this device: {', '.join(missing)}."] if missing else []
    return "\n\n".join(blocks) or NOT_YET


def run_part(name: str, scale: str, path: str) -> None:
    """Measure a part in this process, and write its rows as JSON."""
    set_xla_flags()
    measured = {part.name: part.measure for part in (DEVICE, *PARTS)}[name](SCALES[scale])
    Path(path).write_text(json.dumps(measured))


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
    try:
        if given.page is not None:
            marks(given.page, "gpu")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    main(given)
