"""Where the time of a train step and of beam search goes, by kind of operation: `make benchmark-operations`.

Sums the times of the operations in JAX's profile, and writes the table into the page. The share of the peak counts the
FLOPs of the matrix products of a step; the peak is that of a large float32 product, measured in the same run. A few
minutes on two idle cores.
"""

import gzip
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.progress import track

from benchmarks.multi30k.runs import describe_machine
from benchmarks.pages import marks, write_table
from benchmarks.performance import decoding, training_speed
from twinax.backend.malloc import keep_freed_memory

ROUNDS, SIDE = 5, 2048
# Parts of the names that XLA gives to the operations of a CPU; the first kind that fits counts.
KINDS = {
    "products": ("ynn", "dot"),
    "transposes and copies": ("transpose", "copy"),
    "sums and maxima": ("reduce",),
    "top k": ("custom-call", "sort"),
}
OTHERS = "the rest"
CONTAINERS = ("while", "call", "conditional")  # events that contain those of other operations
NAME, HEADER = "operations", ("work", "milliseconds", *KINDS, OTHERS, "share of the peak")


def main(page: Path) -> None:
    """Measure all work, print the table and write it into the page."""
    marks(page, NAME)
    keep_freed_memory()  # as `twinax train` does
    peak, rows = measure_peak(), []
    with TemporaryDirectory() as temporary:
        for label, flops, run in track([*work(Path(temporary))], transient=True):
            run()  # compiles
            seconds = statistics.median(duration(run) for _ in range(ROUNDS))
            shares = [f"{share:.0%}" for share in time_by_kind(run).values()]
            of_peak = "–" if flops is None else f"{flops / seconds / peak:.0%}"
            rows.append((label, f"{1000 * seconds:,.0f}", *shares, of_peak))
    machine = f"{describe_machine(f'{os.cpu_count()} cores')}, peak {peak / 1e9:.0f} GFLOP/s"
    write_table(page, NAME, HEADER, [*rows, (machine, *["–"] * (len(HEADER) - 1))])


def work(folder: Path) -> Iterator[tuple[str, float | None, Callable[[], object]]]:
    """(label, FLOPs of its products, the work) of each row."""
    from twinax.planning.flops import model_flops

    for size in training_speed.SIZES[::2]:
        config, _ = training_speed.twin_config(size, "float32")
        flops = model_flops(config, size.sentences, size.length, size.length)
        for dtype in ("float32", "bfloat16"):
            step = partial(training_speed.update, training_speed.twinax_step(size, dtype))
            yield f"train step, {size.label}, {dtype}", flops if dtype == "float32" else None, step
    decoding.make_model(folder / "model")
    sources = decoding.sources()
    for quantized in (False, True):
        _, generate = decoding.in_flax(folder / "model", quantized)
        for beam_size in decoding.BEAMS:
            label = f"decoding, beam {beam_size}, {'int8' if quantized else 'float32'}"
            yield label, None, lambda generate=generate, beam_size=beam_size: generate(sources, beam_size)


def measure_peak() -> float:
    """FLOPs per second of a float32 product of two square matrices, the fastest of several."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(SIDE, SIDE)), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    return 2 * SIDE**3 / min(duration(lambda: product(matrix, matrix).block_until_ready()) for _ in range(10))


def duration(run: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def time_by_kind(run: Callable[[], object]) -> dict[str, float]:
    """The share of each kind in the time of all operations."""
    import jax

    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    times: Counter[str] = Counter()
    for event in events:
        name = event.get("name", "")  # the last event is empty
        if "hlo_op" in event.get("args", {}) and not name.startswith(CONTAINERS):
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHERS)
            times[kind] += event["dur"]
    return {kind: times[kind] / times.total() for kind in (*KINDS, OTHERS)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
