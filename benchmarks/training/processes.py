"""Trainings in several processes on this machine, killed and moved to other meshes, against one process.

`python -m benchmarks.training.processes PAGE` prints the tables and writes them into the page; with `kills`, the second
alone. Every process has virtual CPU devices; between processes they communicate by gloo, as machines without a GPU do.
"""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from benchmarks.pages import marks, write_table
from tests.support.cluster import SETTINGS, Cluster, Stage, compare

UPDATES = 24
LOSS_BOUND = 1e-10  # in nats, in float64
KILLS = 25


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
        sys.exit("usage: python -m benchmarks.training.processes PAGE [kills]")
    sys.exit(main(Path(sys.argv[1]), only_kills=len(sys.argv) == 3))
