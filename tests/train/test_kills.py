"""SIGKILL at random moments: listed checkpoints are complete, and the resumed run equals one never killed.

Twenty kills are slow: `make kill-test` prints their counts.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from twinax.train.checkpointing.checkpoints import read_checkpoint

# Every update is saved, so that most kills hit a save; the previous checkpoint is deleted.
SETTINGS = (
    *("--held-out", "10", "--batches.tokens", "70", "--batches.shapes", "1"),
    *("--tokenizer.kind", "word", "--tokenizer.vocab-size", "50"),
    *("--model.d-model", "8", "--model.num-heads", "2", "--model.d-ff", "16", "--model.max-length", "16"),
    *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1"),
    *("--loop.checkpoint-every", "1", "--loop.validate-every", "4", "--loop.average", "2", "--loop.translations", "0"),
)
# Runs the command with PyTorch blocked, because training does not need it.
CODE = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("PyTorch is not here")

sys.meta_path.insert(0, NoTorch())
from twinax.cli.commands import main
main()
"""


class Runs:
    """Start the command on one corpus, with a directory per run."""

    def __init__(self, folder, updates, workers=0):
        self.folder, self.updates, self.workers = folder, updates, workers
        rng = np.random.default_rng(0)
        lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(80)]
        (folder / "src").write_text("\n".join(lines) + "\n")
        (folder / "tgt").write_text("\n".join(lines).upper() + "\n")

    def start(self, name):
        corpus = ("--src", str(self.folder / "src"), "--tgt", str(self.folder / "tgt"))
        settings = (*SETTINGS, "--loop.updates", str(self.updates), "--batches.workers", str(self.workers))
        command = (*corpus, *settings, "--out", str(self.folder / name))
        environment = {
            **os.environ,
            "TWINAX_TEST": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "JAX_PLATFORMS": "cpu",
        }
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        code = [sys.executable, "-c", CODE, "train", *command]
        return subprocess.Popen(code, stderr=subprocess.PIPE, text=True, env=environment)

    def finish(self, name):
        process = self.start(name)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return errors

    def kill(self, name, delay, early=False):
        """Kill the run `delay` after this start's first checkpoint (or its config); False if it had already ended."""
        updates_before = listed(self.folder / name)
        process = self.start(name)

        def waits():
            return listed(self.folder / name) == updates_before and not (
                early and (self.folder / name / "config.json").exists()
            )

        while process.poll() is None and waits():
            time.sleep(0.02)
        time.sleep(delay)
        ended = process.poll() is not None
        process.kill()
        process.communicate()
        return not ended


def processes_of(folder):
    """The ids of the processes that a training in this folder has started."""
    mark = f"TWINAX_TEST={folder}\0".encode()
    ids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if mark in path.read_bytes() + b"\0":
                ids.append(int(path.parent.name))
    return ids


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


def listed(directory):
    return sorted(int(p.name) for p in (directory / "checkpoints").glob("*") if p.name.isdigit())


def whole_records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def arrays_of(path):
    state = read_checkpoint(path).state
    arrays = {**state.params, **{f"mu.{n}": a for n, a in state.optimizer[1].mu.items()}}
    arrays |= {f"nu.{n}": a for n, a in state.optimizer[1].nu.items()}
    return {**arrays, "update": state.update, "position": state.position, "seed": state.seed}


def kill_and_compare(folder: Path, kills: int, updates: int, seed: int) -> Counter[str]:
    """Counts of events; fails if anything is incomplete, lost, repeated or different.

    A worker prepares the batches of the run that is never killed. The first of several kills may precede a checkpoint.
    """
    runs, rng, counts = Runs(folder, updates), random.Random(seed), Counter()
    assert "leaked" not in Runs(folder, updates, workers=1).finish("never")
    assert processes_of(folder) == []
    while counts["kills"] < kills:
        if not runs.kill("killed", rng.uniform(0, 1), early=counts["kills"] == 0 and kills > 1):
            counts["ended before the kill"] += 1
            break
        counts["kills"] += 1
        checkpoints = folder / "killed" / "checkpoints"
        names = [p.name for p in checkpoints.glob("*")] if checkpoints.is_dir() else []
        counts["during a save"] += any("tmp" in name for name in names)
        counts["during a deletion"] += (checkpoints / "deleted").is_dir()
        for update in listed(folder / "killed"):
            counts["listed checkpoints read"] += 1
            assert int(read_checkpoint(checkpoints / str(update)).state.update) == update
    runs.finish("killed")
    killed_records, reference_records = (whole_records(folder / name) for name in ("killed", "never"))
    killed_batches, expected = (
        Counter(r["checksum"] for r in records if "loss" in r) for records in (killed_records, reference_records)
    )
    counts["batches lost"] = (expected - killed_batches).total()  # compared by checksum
    counts["batches repeated"] = (killed_batches - expected).total()
    assert (counts["batches lost"], counts["batches repeated"]) == (0, 0)
    assert killed_records == reference_records  # every loss, norm and rate, bit-identical
    assert listed(folder / "killed") == listed(folder / "never")
    for name in (f"checkpoints/{updates}", f"averaged/{updates}"):
        left, right = (arrays_of(folder / run / name) for run in ("killed", "never"))
        counts["arrays bit-identical"] += len(left)
        assert left.keys() == right.keys()
        for key, array in left.items():
            assert np.asarray(array).tobytes() == np.asarray(right[key]).tobytes(), key
    return counts


def kill_with_workers(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Counts of events; fails if a worker or a segment of shared memory outlives its training."""
    runs, rng, counts = Runs(folder, updates=10**6, workers=2), random.Random(seed), Counter()
    before = shared_memory()
    while counts["kills"] < kills:
        assert runs.kill("killed", rng.uniform(0, 2))
        counts["kills"] += 1
        for _ in range(100):  # a worker that is being started notices it late
            if not processes_of(folder):
                break
            time.sleep(0.1)
        assert processes_of(folder) == []
        assert shared_memory() <= before
    return counts


def test_workers_end_with_their_training(tmp_path):
    assert kill_with_workers(tmp_path, kills=1, seed=0)["kills"] == 1


@pytest.mark.slow
def test_ten_kills_with_workers(tmp_path, capsys):
    counts = kill_with_workers(tmp_path, kills=10, seed=1)
    with capsys.disabled():
        print("\n" + "\n".join(f"{name} with workers: {number}" for name, number in counts.items()))


@pytest.mark.slow
def test_twenty_kills(tmp_path, capsys):
    counts = kill_and_compare(tmp_path, kills=20, updates=80, seed=1)
    with capsys.disabled():
        print("\n" + "\n".join(f"{name}: {number}" for name, number in counts.items()))
    assert counts["kills"] == 20
    assert counts["during a save"] > 0
