"""Runs in several processes of this machine, and the comparison of their records."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SETTINGS = (
    *("--held-out", "21", "--batches.tokens", "280", "--batches.shapes", "2", "--tokenizer.kind", "word"),
    *("--model.d-model", "16", "--model.num-heads", "4", "--model.d-ff", "32", "--model.max-length", "32"),
    *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1", "--model.residual-dropout", "0.1"),
    *("--model.param-dtype", "float64", "--model.compute-dtype", "float64", "--training.accumulation", "2"),
    *("--training.schedule", "constant", "--training.learning-rate", "0.01", "--training.warmup-updates", "0"),
    *("--loop.validate-every", "6", "--loop.translations", "5"),
)


class Stage(NamedTuple):
    """A part of a run: processes, devices in each of them, and flags of the mesh."""

    processes: int
    devices: int
    mesh: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = ", ".join(f"{f.removeprefix('--sharding.')} {n}" for f, n in zip(*[iter(self.mesh)] * 2, strict=True))
        return f"{self.processes} × {self.devices}" + (f" ({axes})" if axes else "")


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
        program = Path(sys.executable).with_name("twinax")
        command = [str(program), "train", "--src", "src", "--tgt", "tgt", *self.settings]
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
