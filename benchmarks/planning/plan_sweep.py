"""Plans of the base and big model on slices of TPUs: `make plan-sweep`.

`python -m benchmarks.planning.plan_sweep PAGE PICTURE` prints an example of `twinax plan`, ranks all meshes of all
slices, compiles the best two meshes of six slices, writes all into the page, and draws the picture. Nothing is run.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.pages import marks, write_between, write_table
from twinax import TransformerConfig
from twinax.cli.plan.plan_plot import plot_sweep
from twinax.cli.plan.plan_report import figures, sweep_cells
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.planning.compilation import check_compiler, compile_apart
from twinax.planning.sweep import Candidate, rank
from twinax.planning.topology import Topology, family, parse_topology
from twinax.planning.workload import Workload

EXAMPLE = ("base", "--topology", "v5e:4x4", "--compute-dtype", "bfloat16", "--mesh", "data=4,tensor=4")
COMPILED = ("v6e:1x1", "v5e:4x4", "v5p:2x4x4", "v4:4x4x4", "v6e:8x8", "v5e:16x16")
FAMILIES = ("v4", "v5e", "v5p", "v6e")
PRESETS = ("base", "big")
ROWS, LENGTH, UPDATES, MESHES = 512, 64, 100_000, 2
HEADER = ("slice", "chips", "data", "fsdp", "tensor", "ms", "limited by", "MFU", "GB", "chip-hours", "")
Row = dict[str, Any]


def workload(preset: str) -> Workload:
    """What is planned."""
    model = TransformerConfig.preset(preset, compute_dtype="bfloat16")
    return Workload(RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=model), ROWS, LENGTH, LENGTH)


def plan(preset: str) -> list[Row]:
    """The rows of a preset: of each slice the best mesh, and of those that are compiled the best two."""
    rows = [row for name in FAMILIES for topology in family(name) for row in plan_slice(preset, topology)]
    return sorted(rows, key=lambda row: (row["chips"], row["topology"], row["seconds_per_update"]))


def plan_slice(preset: str, topology: Topology) -> list[Row]:
    """The rows of one slice."""
    work = workload(preset)
    candidates = [c for c in rank(work, [topology]) if c.obstacle is None]
    if str(topology) not in COMPILED:
        return [figures(work, UPDATES, candidate, None) for candidate in candidates[:1]]
    return [compiled(work, candidate) for candidate in candidates[:MESHES]]


def compiled(work: Workload, candidate: Candidate) -> Row:
    """The row of a mesh whose train step is compiled."""
    start = time.monotonic()
    program = next(iter(compile_apart(work, candidate.topology, candidate.sharding, only_step=True)))
    row = figures(work, UPDATES, candidate, program)
    estimated, seconds = row["estimated_seconds"] * 1e3, time.monotonic() - start
    print(f"{candidate.topology} {candidate.sharding}: estimate {estimated:.3g} ms, compiled", end=" ")
    print(f"{row['seconds_per_update'] * 1e3:.3g} ms in {seconds:.0f} s", flush=True)
    return row


def print_example() -> str:
    """What the example of the page prints."""
    command = [str(Path(sys.executable).with_name("twinax")), "plan", *EXAMPLE]
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def main(page: Path, picture: Path) -> None:
    """Plans both presets, prints the tables, writes them into the page."""
    for name in ("plan example", "plan estimates", *(f"plan {preset}" for preset in PRESETS)):
        marks(page, name)
    check_compiler(parse_topology(COMPILED[0]))
    example = print_example()
    Console().print(example, markup=False, highlight=False)
    write_between(page, "plan example", f"```\n{example}```")
    ratios = []
    for preset in PRESETS:
        rows = plan(preset)
        ratios += [row["estimated_seconds"] / row["seconds_per_update"] for row in rows if row["how"] == "compiled"]
        write_table(page, f"plan {preset}", HEADER, [sweep_cells(row) for row in rows])
        if preset == PRESETS[0]:
            plot_sweep(rows, str(picture))
    sentence = (
        f"The estimates of the {len(ratios)} compiled rows are {min(ratios):.2f} to {max(ratios):.2f} times the bound"
    )
    write_between(page, "plan estimates", f"{sentence} of the compiled program.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.planning.plan_sweep PAGE PICTURE")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
