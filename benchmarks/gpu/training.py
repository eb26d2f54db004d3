"""Train steps of twinax and of PyTorch on one device, alternating: speed, memory, and the share of the peak."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.alternating import Program, alternate, spread, started
from benchmarks.gpu.scale import Scale
from benchmarks.training_speed import Size, Step, torch_step, twin_config, twinax_step, update

ANY_ORDER = "--xla_gpu_deterministic_ops=false"  # in XLA_FLAGS: takes precedence over what `set_xla_flags` sets
ALIKE = 0.1  # nats: how far the losses of equal trainings part by their dropout masks, at most


class Kind(NamedTuple):
    """A way to make an update."""

    make_step: Callable[[Size, str], Step]
    dtype: str
    flags: str = ""


FUSED = partial(twinax_step, attention="fused")
COMPILED = partial(torch_step, is_compiled=True)
REFERENCE = "PyTorch compiled, bfloat16"
KINDS = {
    REFERENCE: Kind(COMPILED, "bfloat16"),
    "PyTorch eager, bfloat16": Kind(torch_step, "bfloat16"),
    "twinax, bfloat16": Kind(twinax_step, "bfloat16"),
    "twinax, bfloat16, not deterministic": Kind(twinax_step, "bfloat16", ANY_ORDER),
    "twinax, bfloat16, fused attention, not deterministic": Kind(FUSED, "bfloat16", ANY_ORDER),
    "PyTorch compiled, float32": Kind(COMPILED, "float32"),
    "twinax, float32": Kind(twinax_step, "float32"),
}
# PyTorch and twinax; then also with other dtypes and flags, of which ANY_ORDER triples the time of compilation
MAIN = tuple(name for name, kind in KINDS.items() if kind.dtype == "bfloat16" and not kind.flags)
FURTHER = (REFERENCE, "twinax, bfloat16", *(name for name in KINDS if name not in MAIN))


def prepare(kind: Kind, size: Size) -> tuple[tuple[int, float], Callable[[int], float]]:
    """((bytes on the device, seconds of the first update), so many updates of a compiled step)."""
    from twinax.train.xla_flags import set_xla_flags

    set_xla_flags()
    step = kind.make_step(size, kind.dtype)
    begin = time.perf_counter()
    update(step)
    return (most_memory(kind.make_step), time.perf_counter() - begin), partial(update, step)


def most_memory(make_step: Callable[..., Step]) -> int:
    """Bytes that this process has held on the device at once; 0 on a CPU."""
    if make_step in (FUSED, twinax_step):
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def train(scale: Scale, model: int, sentences: int, names: Sequence[str] = MAIN) -> list[list[str]]:
    """One row per program, for one of the scale's models and numbers of sentences."""
    from twinax.train.planning.flops import model_flops

    size = scale.trained[model]._replace(sentences=scale.sentences[sentences])
    kinds = {name: KINDS[name] for name in names if not scale.programs or name in scale.programs}
    flags = os.environ.get("XLA_FLAGS", "")
    programs = [
        Program(name, partial(prepare, kind, size), {"XLA_FLAGS": f"{flags} {kind.flags}".strip()})
        for name, kind in kinds.items()
    ]
    flops = model_flops(twin_config(size, "bfloat16")[0], size.sentences, size.length, size.length)
    with started(programs, size.label, together=True) as running:
        seconds, losses = alternate(running, scale.rounds, size.label, scale.steps)
        starts = {name: program.about for name, program in running.items()}
    rows = []
    expected = losses.get(REFERENCE, statistics.median(losses.values()))
    for name, kind in kinds.items():
        cells = [size.label, str(size.sentences), name]
        if name not in seconds:
            rows.append([*cells, "failed", *[""] * 5])
            continue
        step = statistics.median(seconds[name]) / scale.steps
        ratio = spread(seconds[REFERENCE], seconds[name]) if REFERENCE in seconds else ""
        if abs(losses[name] - expected) > ALIKE:
            cells[-1] += f" (loss {losses[name]:.3f}, not {expected:.3f})"
        tokens = f"{size.sentences * size.length / step:,.0f}"
        share = utilization(flops / step, kind.dtype)
        memory, first = starts[name]
        rows.append([*cells, f"{1000 * step:.2f}", ratio, tokens, f"{memory / 1e9:.1f}", f"{first:.0f}", share])
    return rows


def utilization(flops_per_second: float, dtype: str, kind: str | None = None) -> str:
    """Percent of the peak of a device in a dtype, or "unknown peak". `kind`: None is this process's device."""
    import jax

    from twinax.train.planning.chips import chip_of

    chip = chip_of(kind or jax.devices()[0].device_kind)
    return "unknown peak" if chip is None else f"{flops_per_second / chip.peak(dtype):.1%}"
