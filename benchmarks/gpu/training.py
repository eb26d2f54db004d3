"""Train steps of twinax and of PyTorch on one device, alternating: speed, memory, and the share of the peak."""

import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    "twinax, bfloat16, fused attention": Kind(FUSED, "bfloat16"),
    "twinax, bfloat16, fused attention, not deterministic": Kind(FUSED, "bfloat16", ANY_ORDER),
    "PyTorch compiled, float32": Kind(COMPILED, "float32"),
    "twinax, float32": Kind(twinax_step, "float32"),
}


class Running(NamedTuple):
    """Steps of one model by their number of sentences, and the most memory that each has needed."""

    steps: dict[int, Step]
    bytes: dict[int, int]

    def __call__(self, sentences: int, count: int) -> float:
        """The loss after `count` updates."""
        return update(self.steps[sentences], count)


def prepare(kind: Kind, size: Size, sentences: Sequence[int]) -> tuple[Any, Running]:
    """(the device and the memory, compiled steps)."""
    from twinax.train.xla_flags import set_xla_flags

    set_xla_flags()
    running = Running({}, {})
    for number in sentences:
        running.steps[number] = kind.make_step(size._replace(sentences=number), kind.dtype)
        update(running.steps[number])
        running.bytes[number] = most_memory(kind.make_step)
    return running.bytes, running


def most_memory(make_step: Callable[..., Step]) -> int:
    """Bytes that this process has held on the device at once; 0 on a CPU."""
    if make_step in (FUSED, twinax_step):
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def train(scale: Scale, number: int) -> list[list[str]]:
    """One row per batch size and program, for one of the scale's models."""
    from twinax.train.planning.flops import model_flops

    size = scale.trained[number]
    kinds = {name: KINDS[name] for name in scale.programs or KINDS}
    programs = [
        Program(
            name,
            partial(prepare, kind, size, scale.sentences),
            {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {kind.flags}".strip()},
        )
        for name, kind in kinds.items()
    ]
    rows = []
    flops_per_pair = model_flops(twin_config(size, "bfloat16")[0], 1, size.length, size.length)
    with started(programs, size.label, together=True) as running:
        for sentences in reversed(scale.sentences):
            label = f"{size.label}, {sentences} pairs"
            seconds, losses = alternate(running, scale.rounds, label, sentences, scale.steps)
            expected = losses.get(REFERENCE, statistics.median(losses.values()))
            for name, kind in kinds.items():
                cells = [size.label, str(sentences), name]
                if name not in running:
                    rows.append([*cells, "failed", *[""] * 4])
                    continue
                step = statistics.median(seconds[name]) / scale.steps
                ratio = spread(seconds[name], seconds[REFERENCE]) if REFERENCE in seconds else ""
                alike = "" if abs(losses[name] - expected) < ALIKE else f" (loss {losses[name]:.3f}, not {expected:.3f})"
                cells[-1] += alike
                flops = flops_per_pair * sentences / step
                memory = f"{running[name].about[sentences] / 1e9:.1f}"
                tokens = f"{sentences * size.length / step:,.0f}"
                rows.append([*cells, f"{1000 * step:.2f}", ratio, tokens, memory, utilization(flops, kind.dtype)])
    return rows


def utilization(flops_per_second: float, dtype: str, kind: str | None = None) -> str:
    """Percent of the peak of a device in a dtype, or "unknown peak". `kind`: None is this process's device."""
    import jax

    from twinax.train.planning.chips import chip_of

    chip = chip_of(kind or jax.devices()[0].device_kind)
    return "unknown peak" if chip is None else f"{flops_per_second / chip.peak(dtype):.1%}"
