"""Where the time of a training step goes, and what `twinax plan` predicts for it."""

import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.scale import Scale
from benchmarks.performance.training_speed import twin_config, twinax_program, twinax_step, update

OPERATIONS, TRACED_STEPS = 15, 5


def operations(scale: Scale) -> list[list[str]]:
    """The kinds of operation that take most of the device's time in a training step."""
    import jax

    step = twinax_step(scale.trained[0]._replace(sentences=scale.sentences[-1]), "bfloat16")
    update(step, 2)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            update(step, TRACED_STEPS)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for name, nanoseconds in device_events(jax.profiler.ProfileData.from_file(str(trace))):
            kind = re.sub(r"[._]\d+\b", "", name)
            times[kind] += nanoseconds
            counts[kind] += 1
    if not times:
        sys.exit("the trace has no operations of this device; perhaps it names its lines otherwise")
    total = sum(times.values())
    rows = []
    for name, spent in times.most_common(OPERATIONS):
        milliseconds = f"{spent / 1e6 / TRACED_STEPS:.2f}"
        rows.append([f"`{name[:90]}`", f"{counts[name] / TRACED_STEPS:.0f}", milliseconds, f"{spent / total:.1%}"])
    return [*rows, ["all", f"{counts.total() / TRACED_STEPS:.0f}", f"{total / 1e6 / TRACED_STEPS:.2f}", "100%"]]


def device_events(trace: Any) -> Iterator[tuple[str, float]]:
    """(name, nanoseconds) of the operations in a trace: of a TPU's cores, a GPU's streams or XLA's CPU threads."""
    planes = list(trace.planes)
    for plane in [plane for plane in planes if plane.name.startswith("/device:")] or planes:
        for line in plane.lines:
            if line.name == "XLA Ops" or line.name.startswith(("Stream", "tf_XLA")):
                for event in line.events:
                    if "::" not in event.name and not event.name.startswith("end: "):  # of the CPU's runtime
                        yield event.name, event.duration_ns


def plan(scale: Scale) -> list[list[str]]:
    """Time and memory of a step beside the bound and the estimate of `twinax plan`: one row."""
    import jax

    from twinax.configs.data import CorpusConfig
    from twinax.configs.run import RunConfig
    from twinax.configs.sharding import ShardingConfig
    from twinax.planning.estimate import estimate
    from twinax.planning.roofline import roofline
    from twinax.planning.topology import Topology
    from twinax.planning.workload import Workload

    size = scale.trained[0]._replace(sentences=scale.sentences[-1])
    step, state, batch = twinax_program(size, "bfloat16")
    arrays = state.params, state.buffers, state.seed, state.update, batch
    programs = [step.compute_sums.lower(*arrays).compile()]
    sums = jax.eval_shape(step.compute_sums, *arrays)
    programs.append(step._apply.lower(state, sums).compile())
    moved = sum((program.cost_analysis() or {}).get("bytes accessed", 0.0) for program in programs)
    memories = [program.memory_analysis() for program in programs]
    used = max(memory.argument_size_in_bytes + memory.temp_size_in_bytes for memory in memories)
    times = []
    state, _ = step(state, batch)
    for _ in range(scale.rounds):
        begin = time.perf_counter()
        for _ in range(scale.steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - begin) / scale.steps)
    seconds = statistics.median(times)

    chip = chip_to_plan(jax.devices()[0])
    config, _ = twin_config(size, "bfloat16")
    workload = Workload(
        RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=config), size.sentences, *[size.length] * 2
    )
    cost, memory = estimate(workload, ShardingConfig(data=1))
    bounds = share = "unknown peak"
    if chip is not None:
        bound = roofline(cost, Topology(chip, "1"), config.compute_dtype)
        bounds = f"{1000 * bound.seconds:.2f} to {1000 * bound.without_overlap:.2f}"
        share = f"{moved / seconds / chip.hbm_bandwidth:.0%}"
    return [[
        bounds,
        f"{1000 * seconds:.2f}",
        f"{memory.total / 1e9:.1f}",
        f"{used / 1e9:.1f}",
        f"{cost.hbm_bytes / 1e9:.1f}",
        f"{moved / 1e9:.1f}",
        share,
    ]]  # fmt: skip


def chip_to_plan(device: Any) -> Any:
    """The chip of a JAX device, None if its peaks are unknown; an H200 for a CPU, on which figures mean nothing."""
    from twinax.planning.chips import CHIPS, chip_of

    return CHIPS["h200"] if device.platform == "cpu" else chip_of(device.device_kind)
