"""Trainings in several processes on this machine, killed and moved to other meshes, against one process.

`python -m benchmarks.processes PAGE` prints the tables and writes them into the page; with `kills`, the second alone.
Every process has virtual CPU devices; between processes they communicate by gloo, as machines without a GPU do.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.pages import marks, write_table

UPDATES = 24
LOSS_BOUND = 1e-10  # in nats, in float64
SETTINGS = (
    *("--held-out", "21", "--batches.tokens", "280", "--batches.shapes", "2", "--tokenizer.kind", "word"),
    *("--model.d-model", "16", "--model.num-heads", "4", "--model.d-ff", "32", "--model.max-length", "32"),
    *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1", "--model.residual-dropout", "0.1"),
    *("--model.param-dtype", "float64", "--model.compute-dtype", "float64", "--training.accumulation", "2"),
    *("--training.schedule", "constant", "--training.learning-rate", "0.01", "--training.warmup-updates", "0"),
    *("--loop.validate-every", "6", "--loop.translations", "5"),
)
KILLS = 25


class Stage(NamedTuple):
    """A part of a run: processes, devices in each of them, and flags of the mesh."""

    processes: int
    devices: int
    mesh: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = ", ".join(f"{f.removeprefix('--sharding.')} {n}" for f, n in zip(*[iter(self.mesh)] * 2, strict=True))
        return f"{self.processes} × {self.devices}" + (f" ({axes})" if axes else "")


FSDP, TENSOR = ("--sharding.fsdp", "4"), ("--sharding.tensor", "2")
# each trains a third of the updates, or half, then the next goes on
PLANS: tuple[tuple[Stage, ...], ...] = (
    (Stage(2, 1),),
    (Stage(2, 2, TENSOR),),
    (Stage(4, 1),),
    (Stage(4, 2, FSDP),),
    (Stage(1, 8), Stage(1, 4), Stage(1, 1)),
    (Stage(4, 1), Stage(2, 1), Stage(1, 1)),
    (Stage(2, 2, FSDP), Stage(2, 1, TENSOR)),
)


class Cluster:
    """A corpus in a folder, and runs on it in several processes of this machine."""

    def __init__(self, folder: Path, settings: Sequence[str] = SETTINGS):
        self.folder, self.settings = folder, settings
        rng = np.random.default_rng(0)
        lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(2, 25))) for _ in range(160)]
        (folder / "src").write_text("\n".join(lines) + "\n")
        (folder / "tgt").write_text("\n".join(lines).upper() + "\n")

    def start(self, name: str, updates: int, stage: Stage) -> list[subprocess.Popen[str]]:
        """Start or resume a run in all processes; each prints to `output` of its number."""
        with socket.socket() as candidate:
            candidate.bind(("", 0))
            port = candidate.getsockname()[1]
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={stage.devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
        environment["XDG_CACHE_HOME"] = str(self.folder / "cache")
        command = [
            str(Path(sys.executable).with_name("twinax")),
            "train",
            "--src",
            "src",
            "--tgt",
            "tgt",
            *self.settings,
        ]
        command += ["--out", name, "--loop.updates", str(updates), *stage.mesh]
        processes = []
        for number in range(stage.processes):
            flags = ("--coordinator", f"localhost:{port}", "--num-processes", stage.processes, "--process-id", number)
            words = [*command, *(map(str, flags) if stage.processes > 1 else ())]
            with self.output(name, number).open("w") as file:
                processes.append(subprocess.Popen(words, stderr=file, text=True, env=environment, cwd=self.folder))
        return processes

    def finish(self, name: str, updates: int, stage: Stage) -> None:
        """Train to this update. Raises: RuntimeError if a process fails."""
        for number, process in enumerate(self.start(name, updates, stage)):
            if process.wait() != 0:
                raise RuntimeError(f"{stage}, process {number}:\n{self.output(name, number).read_text()}")

    def output(self, name: str, number: int) -> Path:
        """What a process of a run printed since its last start."""
        return self.folder / f"{name}.{number}.log"

    def records(self, name: str) -> list[dict[str, Any]]:
        """The records of a run, in order."""
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def checkpoints(self, name: str) -> list[int]:
        """The updates of a run's checkpoints."""
        folder = self.folder / name / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def compare(cluster: Cluster, name: str, reference: str) -> tuple[float, float, int]:
    """(largest difference of a loss, of a validation loss, number of batches that differ) of two runs, in nats.

    A run that is resumed validates at the end of each part too; compared is what both have.
    """
    runs = [cluster.records(name), cluster.records(reference)]
    losses = [{r["update"]: r["loss"] for r in records if "loss" in r} for records in runs]
    validations = [{r["update"]: r["validation"]["loss"] for r in records if "validation" in r} for records in runs]
    batches = [Counter((r["update"], r["checksum"]) for r in records if "loss" in r) for records in runs]
    differing = ((batches[0] - batches[1]) + (batches[1] - batches[0])).total()
    return _difference(*losses), _difference(*validations), differing


def _difference(run: dict[int, float], reference: dict[int, float]) -> float:
    return max(abs(run[update] - reference[update]) for update in run.keys() & reference.keys())


def kill_randomly(cluster: Cluster, kills: int, updates: int, seed: int) -> Counter[str]:
    """Kill one of two processes, or its supervisor, at random moments, and resume it; return counts.

    Raises:
        AssertionError: a listed checkpoint cannot be read, or the run differs from one that was never killed.
    """
    from twinax.train.checkpointing.checkpoints import read_checkpoint

    stage, rng, counts = Stage(2, 1), random.Random(seed), Counter[str]()
    cluster.finish("never", updates, stage)
    while counts["kills"] < kills:
        before = cluster.checkpoints("killed")
        processes = cluster.start("killed", updates, stage)
        while cluster.checkpoints("killed") == before and all(p.poll() is None for p in processes):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.6)
        if any(p.poll() is not None for p in processes):
            raise AssertionError("the run ended before the last kill; give it more updates")
        victim = rng.randrange(2)
        with_supervisor = rng.random() < 0.3
        kill(processes[victim], with_supervisor=with_supervisor)
        counts["kills"] += 1
        print(f"kill {counts['kills']} of {kills}", file=sys.stderr)
        counts[f"kills of process {victim}"] += 1
        counts["kills of a supervisor"] += with_supervisor
        start = time.monotonic()
        for process in processes:
            process.wait(timeout=60)
        counts["most seconds until all had ended"] = max(
            counts["most seconds until all had ended"], round(time.monotonic() - start)
        )
        folder = cluster.folder / "killed" / "checkpoints"
        counts["during a save"] += any("tmp" in path.name for path in folder.glob("*"))
        for update in cluster.checkpoints("killed"):
            assert int(read_checkpoint(folder / str(update)).state.update) == update
            counts["listed checkpoints read"] += 1
    cluster.finish("killed", updates, stage)
    loss, validation, differing = compare(cluster, "killed", "never")
    counts["batches lost or repeated"] = differing
    counts["updates"] = updates
    assert (loss, validation, differing) == (0, 0, 0), (loss, validation, differing)
    return counts


def kill(process: "subprocess.Popen[str]", *, with_supervisor: bool) -> None:
    """SIGKILL to the process below a supervisor, or to the supervisor, which its process does not survive."""
    if with_supervisor:
        process.kill()
        return
    child = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(child.stdout.split()[0]), 9)


def move(page: Path) -> bool:
    """Run PLANS, print the table and write it into the page; return whether every run is the same training."""
    rows = []
    with TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        cluster.finish("one", UPDATES, Stage(1, 1))
        for number, plan in enumerate(PLANS):
            for done, stage in enumerate(plan, 1):
                print(f"processes × devices: {stage}", file=sys.stderr)
                cluster.finish(f"run{number}", UPDATES * done // len(plan), stage)
            loss, validation, differing = compare(cluster, f"run{number}", "one")
            equal = max(loss, validation) <= LOSS_BOUND and not differing
            figures = (f"{loss:.1e}", f"{validation:.1e}", str(differing), "equal" if equal else "DIFFERENT")
            rows.append((" → ".join(map(str, plan)), *figures))
    write_table(page, "processes", ("processes × devices", "losses", "validation", "other batches", ""), rows)
    return all(row[-1] == "equal" for row in rows)


def main(page: Path, *, only_kills: bool) -> int:
    """Measures, prints the tables, writes them into the page. Returns 0 if every run is the same training."""
    jax.config.update("jax_enable_x64", True)
    for name in ("processes", "kills"):
        marks(page, name)
    same = only_kills or move(page)
    with TemporaryDirectory() as folder:
        settings = (*SETTINGS, "--loop.checkpoint-every", "1", "--loop.translations", "0")
        counts = kill_randomly(Cluster(Path(folder), settings), KILLS, 300, seed=0)
    write_table(page, "kills", ("", "number"), [(name, str(number)) for name, number in counts.items()])
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["kills"]):
        sys.exit("usage: python -m benchmarks.processes PAGE [kills]")
    sys.exit(main(Path(sys.argv[1]), only_kills=len(sys.argv) == 3))
