"""Where the time of a training step goes, and what `twinax plan` predicts for it."""

import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.scale import Scale
from benchmarks.training_speed import RATE, SMOOTHING, Size, twin_config

OPERATIONS, TRACED_STEPS = 15, 5


def compiled_step(size: Size) -> Any:
    """(compiled step of both programs, state, batch, model's config, training config)."""
    import jax.numpy as jnp
    from flax import nnx

    from twinax.configs.execution import ExecutionConfig
    from twinax.configs.training import TrainingConfig
    from twinax.flax_transformer.model import Transformer
    from twinax.train.step import Batch, init_state, make_train_step

    config, _ = twin_config(size, "bfloat16")
    training = TrainingConfig(
        label_smoothing=SMOOTHING, schedule="constant", learning_rate=RATE, warmup_updates=0, smoothing="all"
    )
    tokens = [jnp.full((size.sentences, size.length), token, jnp.int32) for token in (4, 5, 6)]
    batch = Batch(*tokens, jnp.arange(size.sentences, dtype=jnp.int32))
    state = init_state(Transformer(config, rngs=nnx.Rngs(0)), training)
    step = make_train_step(config, training, execution=ExecutionConfig(attention="fused"))
    return step.lower(state, batch).compile(), state, batch, config, training


def operations(scale: Scale) -> list[list[str]]:
    """The kinds of operation that take most of the device's time in a training step with fused attention."""
    import jax

    compiled, state, batch, _, _ = compiled_step(scale.trained[0]._replace(sentences=scale.sentences[-1]))
    state, _ = compiled(state, batch)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_STEPS):
                state, _ = compiled(state, batch)
            jax.block_until_ready(state)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for name, nanoseconds in device_events(jax.profiler.ProfileData.from_file(str(trace))):
            kind = re.sub(r"[._]\d+\b|[0-9]+x[0-9]+(x[0-9]+)*", "", name)
            times[kind] += nanoseconds
            counts[kind] += 1
    total = sum(times.values())  # 0, and no rows, if the trace names its lines otherwise
    rows = []
    for name, nanoseconds in times.most_common(OPERATIONS):
        milliseconds = nanoseconds / 1e6 / TRACED_STEPS
        rows.append([f"`{name[:100]}`", f"{counts[name] / TRACED_STEPS:.0f}", f"{milliseconds:.2f}", f"{nanoseconds / total:.1%}"])
    return [*rows, ["all", f"{sum(counts.values()) / TRACED_STEPS:.0f}", f"{total / 1e6 / TRACED_STEPS:.2f}", "100%"]]


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
    """Time and memory of a step beside the bound and the estimate of `twinax plan`, with exact attention."""
    import jax

    from twinax.configs.data import CorpusConfig
    from twinax.configs.execution import ExecutionConfig
    from twinax.configs.run import RunConfig
    from twinax.configs.sharding import ShardingConfig
    from twinax.train.planning.chips import CHIPS, chip_of
    from twinax.train.planning.estimate import estimate
    from twinax.train.planning.roofline import roofline
    from twinax.train.planning.topology import Topology
    from twinax.train.planning.workload import Workload

    chip = chip_of(jax.devices()[0].device_kind) or CHIPS["h200"]
    rows = []
    for size in scale.trained:
        size = size._replace(sentences=scale.sentences[-1])
        compiled, state, batch, config, training = compiled_step(size)
        state, _ = compiled(state, batch)
        times = []
        for _ in range(scale.rounds):
            begin = time.perf_counter()
            for _ in range(scale.steps):
                state, metrics = compiled(state, batch)
            jax.block_until_ready((state, metrics))
            times.append((time.perf_counter() - begin) / scale.steps)
        run = RunConfig(
            corpus=CorpusConfig(src="-", tgt="-"),
            model=config,
            training=training,
            execution=ExecutionConfig(attention="fused"),
        )
        workload = Workload(run, size.sentences, size.length, size.length)
        cost, memory = estimate(workload, ShardingConfig(data=1))
        bound = roofline(cost, Topology(chip, "1"), config.compute_dtype)
        analysis = compiled.cost_analysis() or {}
        used = compiled.memory_analysis()
        seconds = statistics.median(times)
        moved = analysis.get("bytes accessed", 0.0)
        rows.append([
            size.label,
            f"{1000 * bound.seconds:.2f} to {1000 * bound.without_overlap:.2f}",
            f"{1000 * seconds:.2f}",
            f"{memory.total / 1e9:.1f}",
            f"{(used.argument_size_in_bytes + used.temp_size_in_bytes) / 1e9:.1f}",
            f"{moved / 1e9:.1f}",
            f"{moved / seconds / chip.hbm_bandwidth:.0%}",
        ])  # fmt: skip
    return rows
