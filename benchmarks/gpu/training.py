"""Train steps of twinax and of PyTorch on one device, alternating: speed, memory, and the share of the peak."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.alternating import Program, alternate, spread, started
from benchmarks.gpu.scale import Scale
from benchmarks.performance.training_speed import Size, Step, torch_step, twin_config, twinax_step, update

ANY_ORDER = "--xla_gpu_deterministic_ops=false"  # in XLA_FLAGS: takes precedence over what `set_xla_flags` sets
FAILED = "failed"  # in place of a time
ALIKE = 0.1  # nats: how far the losses of equal trainings part by their dropout masks, at most


class Kind(NamedTuple):
    """A way to make an update."""

    make_step: Callable[[Size, str], Step]
    dtype: str
    flags: str = ""


FUSED = partial(twinax_step, attention="fused")
COMPILED = partial(torch_step, is_compiled=True)
REFERENCE = "PyTorch compiled, bfloat16"
TWINAX = "twinax, bfloat16"
FUSED_ATTENTION = "twinax, bfloat16, fused attention, not deterministic"
KINDS = {
    REFERENCE: Kind(COMPILED, "bfloat16"),
    "PyTorch eager, bfloat16": Kind(torch_step, "bfloat16"),
    TWINAX: Kind(twinax_step, "bfloat16"),
    "twinax, bfloat16, not deterministic": Kind(twinax_step, "bfloat16", ANY_ORDER),
    FUSED_ATTENTION: Kind(FUSED, "bfloat16", ANY_ORDER),
    "PyTorch compiled, float32": Kind(COMPILED, "float32"),
    "twinax, float32": Kind(twinax_step, "float32"),
}
SMALL, LARGE = 0, -1  # of the scale's numbers of sentences
# What is measured first, and then the rest, beside the two programs with which it is compared: ANY_ORDER triples the
# time of compilation.
FIRST = tuple(name for name, kind in KINDS.items() if kind.dtype == "bfloat16" and not kind.flags)
MAIN = tuple((name, LARGE) for name in FIRST)
SMALLER = tuple((name, SMALL) for name in FIRST)
OTHERS = tuple((name, LARGE) for name in (REFERENCE, TWINAX, *(name for name in KINDS if name not in FIRST)))
FUSED_ONLY = ((REFERENCE, LARGE), (FUSED_ATTENTION, LARGE))


def prepare(kind: Kind, size: Size) -> tuple[tuple[int, float, str], Callable[[int], float]]:
    """((bytes on the device, seconds of the first update, the device), so many updates of a compiled step)."""
    from twinax.backend.xla_flags import set_xla_flags

    set_xla_flags()
    step = kind.make_step(size, kind.dtype)
    begin = time.perf_counter()
    update(step)
    seconds = time.perf_counter() - begin
    memory, device = used_memory(kind.make_step)
    return (memory, seconds, device), partial(update, step)


def used_memory(make_step: Callable[..., Step]) -> tuple[int, str]:
    """(bytes that this process has held on the device at once, 0 on a CPU; the device)."""
    if getattr(make_step, "func", make_step) is twinax_step:  # a pickled `FUSED` is another object
        import jax

        device = jax.devices()[0]
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0), device.device_kind
    import torch

    if not torch.cuda.is_available():
        return 0, "cpu"
    return torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()


def train(scale: Scale, model: int, programs: Sequence[tuple[str, int]] = MAIN) -> list[list[str]]:
    """One row per program, of one of the scale's models: (name, which of the scale's numbers of sentences)."""
    from twinax.planning.flops import model_flops

    size = scale.trained[model]
    chosen = [(name, scale.sentences[i]) for name, i in programs if not scale.programs or name in scale.programs]
    flags = os.environ.get("XLA_FLAGS", "")
    flops = model_flops(twin_config(size, "bfloat16")[0], 1, size.length, size.length)
    rows = []
    with started(
        [
            Program(
                f"{name}, {sentences}",
                partial(prepare, KINDS[name], size._replace(sentences=sentences)),
                {"XLA_FLAGS": f"{flags} {KINDS[name].flags}".strip()},
            )
            for name, sentences in chosen
        ],
        size.label,
        together=True,
    ) as running:
        seconds, losses = alternate(running, scale.rounds, size.label, scale.steps, together=True)
        for name, sentences in chosen:
            cells, program = [size.label, str(sentences), name], f"{name}, {sentences}"
            if program not in seconds:
                rows.append([*cells, FAILED, *[""] * 5])
                continue
            memory, first, device = running[program].about
            step = statistics.median(seconds[program]) / scale.steps
            reference = f"{REFERENCE}, {sentences}"
            ratio = spread(seconds[reference], seconds[program]) if reference in seconds else ""
            expected = losses.get(reference, losses[program])
            if abs(losses[program] - expected) > ALIKE:
                ratio += f", loss {losses[program]:.3f}, not {expected:.3f}"
            figures = f"{1000 * step:.2f}", ratio, f"{sentences * size.length / step:,.0f}"
            share = utilization(flops * sentences / step, KINDS[name].dtype, device)
            rows.append([*cells, *figures, f"{memory / 1e9:.1f}", f"{first:.0f}", share])
    return rows


def utilization(flops_per_second: float, dtype: str, kind: str) -> str:
    """Percent of the peak of a device in a dtype, or "unknown peak". `kind`: as JAX and CUDA name it."""
    from twinax.planning.chips import chip_of

    chip = chip_of(kind)
    return "unknown peak" if chip is None else f"{flops_per_second / chip.peak(dtype):.1%}"
