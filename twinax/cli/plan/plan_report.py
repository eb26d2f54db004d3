"""Prints a plan or a sweep, and returns it as values for JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ...backend.errors import ConfigError
from ...configs.sharding import ShardingConfig
from ...planning.compilation import CompiledProgram, check_compiler, compile_apart
from ...planning.cost import KINDS, Cost
from ...planning.pathologies import pathologies
from ...planning.programs import BEAM_SIZE, search_rows
from ...planning.roofline import Bound, roofline
from ...planning.sweep import Candidate, rank, utilization
from ...planning.topology import Topology, family, parse_topology
from ...planning.workload import Workload
from ...train.tracking.progress import spinner

_ROWS = 12  # meshes of a sweep that are listed
_HEADER = ("topology", "chips", "data", "fsdp", "tensor", "ms, at least", "limited by", "MFU, at most")
_HEADER += ("GB per chip", "chip-hours", "")
_TEXT = ("topology", "limited by", "")
Document = dict[str, Any]


def print_plan(
    workload: Workload, updates: int, topology_name: str, sharding: ShardingConfig, name: str
) -> tuple[bool, Document]:
    """Compile and print a plan; whether it fits, and its values. Raises: ConfigError if it cannot be compiled."""
    topology = parse_topology(topology_name)
    sharding = ShardingConfig(**sharding.sizes(topology.chips))
    workload.check(sharding, topology.chips)
    check_compiler(topology)
    console, dtype = Console(soft_wrap=True, highlight=False), workload.run.model.compute_dtype
    batch = workload.padded(sharding)
    console.print(f"{name} on {topology.chips:,} × {topology.chip.title} ({topology}), {sharding}", markup=False)
    search = f"beam search of {search_rows(sharding)} sentences with {BEAM_SIZE} hypotheses"
    console.print(f"batch of {batch.shape()} tokens, {dtype}; {search}", markup=False)
    programs = []
    with spinner("compiling the train step, validation and beam search; minutes"):
        for program in compile_apart(workload, topology, sharding):
            programs.append(program)
    console.print(_program_table(topology, dtype, programs))
    fits = all(p.cost is not None and p.memory.total <= topology.chip.hbm_bytes for p in programs)
    step = programs[0].cost
    document: Document = {"topology": str(topology), "mesh": asdict(sharding), "batch": batch.shape(), "fits": fits}
    document["programs"] = [asdict(p) for p in programs]
    if step is not None:
        bound = roofline(step, topology, dtype)
        document["run"] = _run_figures(workload, updates, topology, bound)
        for line in _run_lines(document["run"], bound):
            console.print(line, markup=False)
    problems = pathologies(workload, topology, sharding, programs)
    document["pathologies"] = [p._asdict() for p in problems]
    for line in (*map(str, problems), _assumptions(topology)):
        console.print(line, markup=False)
    return fits, document


def _program_table(topology: Topology, dtype: str, programs: Sequence[CompiledProgram]) -> Table:
    table = Table(Column("per chip", no_wrap=True), *(Column(p.name, justify="right") for p in programs))

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cells):
            table.add_row(label, *cells)

    costs = [p.cost for p in programs]
    for part in ("arguments", "temporaries", "results", "code"):
        add(part, [_size(getattr(p.memory, part)) for p in programs])
    add(f"memory, of {_size(topology.chip.hbm_bytes)}", [_fit(p, topology) for p in programs])
    add("FLOPs of products", [f"{c.flops:.3g}" if c else "" for c in costs])
    estimated = "" if topology.chip.is_tpu else ", estimated"
    add(f"bytes of HBM{estimated}", [_size(c.hbm_bytes) if c else "" for c in costs])
    for kind in KINDS:
        add(f"{kind}: number, sent", [_sent(c, kind) for c in costs])
    bounds = [c and roofline(c, topology, dtype) for c in costs]
    add("time, at least", [f"{b.seconds * 1e3:.3g} ms" if b else "" for b in bounds])
    add("limited by", [b.limit if b else "" for b in bounds])
    return table


def _fit(program: CompiledProgram, topology: Topology) -> str:
    total, limit = program.memory.total, topology.chip.hbm_bytes
    if program.cost is None or total > limit:
        return f"{_size(total)}: does not fit" + (f" by {_size(total - limit)}" if total > limit else "")
    return f"{_size(total)}: fits"


def _sent(cost: Cost | None, kind: str) -> str:
    parts = [c for c in (cost.collectives if cost else ()) if c.kind == kind and c.group > 1]
    return f"{sum(c.count for c in parts):,.0f}, {_size(sum(c.sent for c in parts))}" if parts else ""


def _size(number: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:,.3g} {unit}"
    return f"{number:,.0f} B"


def _run_figures(workload: Workload, updates: int, topology: Topology, bound: Bound) -> Document:
    hours = updates * bound.seconds / 3600
    return {
        "seconds_per_update": bound.seconds,
        "limit": bound.limit,
        "seconds": bound.parts,
        "utilization": utilization(workload, topology, bound),
        "tokens_per_second": workload.tokens / bound.seconds,
        "updates": updates,
        "hours": hours,
        "chip_hours": hours * topology.chips,
    }


def _run_lines(figures: Document, bound: Bound) -> list[str]:
    parts = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in bound.parts.items())
    return [
        f"an update takes at least {bound.seconds * 1e3:.3g} ms, limited by {bound.limit} ({parts})",
        f"at most {figures['utilization']:.0%} model FLOPs utilization and "
        f"{figures['tokens_per_second']:,.0f} target tokens per second",
        f"{figures['updates']:,} updates take at least {_time(figures['hours'])}: "
        f"{figures['chip_hours']:,.3g} chip-hours",
    ]


def _time(hours: float) -> str:
    for unit, size in (("hours", 1.0), ("minutes", 60.0)):
        if hours * size >= 1:
            return f"{hours * size:,.3g} {unit}"
    return f"{hours * 3600:,.3g} seconds"


def _assumptions(topology: Topology) -> str:
    if topology.chip.is_tpu:
        return "compiled for this slice, not run: the bound assumes that compute, HBM and links overlap perfectly"
    return (
        "computed, not compiled for this chip: the program partitioned for as many CPU devices gives FLOPs and "
        "communication; its temporaries are a CPU's, and bytes of HBM are an estimate"
    )


def print_sweep(workload: Workload, updates: int, name: str, picture: str | None) -> tuple[bool, Document]:
    """Ranks meshes, compiles the best two and prints all; whether one fits, and the values."""
    topologies = [parse_topology(name)] if ":" in name else family(name)
    candidates = rank(workload, topologies)
    possible = [c for c in candidates if c.obstacle is None]
    console = Console(soft_wrap=True, highlight=False)
    shown = _best_per_topology(possible) if len(topologies) > 1 else possible
    chosen = _chosen(shown)
    compiled, note = _compile(workload, chosen)
    rows = [figures(workload, updates, c, compiled.get(_key(c))) for c in shown]
    table = Table(*(Column(h, justify="left" if h in _TEXT else "right") for h in _HEADER))
    for row in rows[:_ROWS]:
        table.add_row(*sweep_cells(row))
    console.print(table)
    if len(rows) > _ROWS:
        console.print(f"and {len(rows) - _ROWS} slower ones")
    for reason, number in _obstacles(candidates):
        console.print(f"not possible: {number} mesh{'es' if number > 1 else ''}: {reason}", markup=False)
    for line in filter(None, (note, "estimates assume perfect overlap; nothing was run")):
        console.print(line, markup=False)
    if picture is not None and shown:
        from .plan_plot import plot_sweep

        plot_sweep(rows, picture)
        console.print(f"picture: {picture}", markup=False)
    impossible = [{"topology": str(c.topology), "mesh": asdict(c.sharding), "obstacle": c.obstacle} for c in candidates]
    return bool(possible), {"ranked": rows, "impossible": [row for row in impossible if row["obstacle"]]}


def _best_per_topology(candidates: Sequence[Candidate]) -> list[Candidate]:
    best: dict[str, Candidate] = {}
    for candidate in candidates:  # in ascending order of time
        best.setdefault(str(candidate.topology), candidate)
    return list(best.values())


def _chosen(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The two to compile: of one topology the fastest; of several the fastest and that of the fewest chip-hours."""
    if len({str(c.topology) for c in candidates}) < 2:
        return list(candidates[:2])
    cheapest = min(candidates, key=lambda c: c.seconds * c.topology.chips)
    return [candidates[0], cheapest if cheapest is not candidates[0] else candidates[1]]


def _key(candidate: Candidate) -> tuple[str, str]:
    return str(candidate.topology), str(candidate.sharding)


def _compile(
    workload: Workload, candidates: Sequence[Candidate]
) -> tuple[dict[tuple[str, str], CompiledProgram], str | None]:
    """The compiled steps of some candidates; and why there are none."""
    compiled: dict[tuple[str, str], CompiledProgram] = {}
    try:
        for candidate in candidates:
            with spinner(f"compiling for {candidate.topology}, {candidate.sharding}"):
                for program in compile_apart(workload, candidate.topology, candidate.sharding, only_step=True):
                    compiled[_key(candidate)] = program
    except ConfigError as error:
        return compiled, f"not compiled: {error}"
    return compiled, None


def figures(workload: Workload, updates: int, candidate: Candidate, program: CompiledProgram | None) -> Document:
    """The figures of a mesh: estimated, or those of its compiled step."""
    assert candidate.bound is not None
    assert candidate.memory is not None
    topology, bound, memory = candidate.topology, candidate.bound, candidate.memory
    row = {"topology": str(topology), "chips": topology.chips, "mesh": asdict(candidate.sharding)}
    row |= {"memory": memory.total, "how": "computed", **_run_figures(workload, updates, topology, bound)}
    if program is None:
        return row
    row |= {"estimated_seconds": bound.seconds, "how": "compiled", "memory": program.memory.total}
    if program.cost is None or program.memory.total > topology.chip.hbm_bytes:
        return row | {"how": "compiled: does not fit"}
    bound = roofline(program.cost, topology, workload.run.model.compute_dtype)
    return row | _run_figures(workload, updates, topology, bound)


def sweep_cells(row: Document) -> tuple[str, ...]:
    """The cells of a row: topology, chips, axes, milliseconds, limit, MFU, GB per chip, chip-hours, how it is known."""
    times = (f"{row['seconds_per_update'] * 1e3:.3g}", row["limit"], f"{row['utilization']:.0%}")
    sizes = (f"{row['memory'] / 1e9:.2f}", f"{row['chip_hours']:,.3g}")
    return row["topology"], f"{row['chips']:,}", *map(str, row["mesh"].values()), *times, *sizes, row["how"]


def _obstacles(candidates: Sequence[Candidate]) -> list[tuple[str, int]]:
    return Counter(c.obstacle.split("; ")[0] for c in candidates if c.obstacle is not None).most_common()
