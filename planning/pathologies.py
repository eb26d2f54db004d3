"""Names what makes a step slower or larger than it must be, each with the setting that fixes it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..configs.sharding import ShardingConfig
from .compilation import CompiledProgram
from .cost import Cost
from .estimate import estimate
from .roofline import Bound, roofline
from .topology import Topology
from .workload import Workload

LANES = 128  # of a TPU: the last dimension of an array is padded to a multiple


class Pathology(NamedTuple):
    """Something that costs time or memory."""

    name: str
    description: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.description}; {self.remedy}"


def pathologies(
    workload: Workload, topology: Topology, sharding: ShardingConfig, programs: Sequence[CompiledProgram]
) -> list[Pathology]:
    """What a plan shows to be slow: in the config on this topology, and in the compiled programs."""
    lines = [*_too_large(workload, topology, sharding, programs), *_padded_rows(workload, sharding)]
    if topology.chip.is_tpu:
        lines += [*_padded_dimensions(workload, sharding), *_narrow_heads(workload)]
    for program in programs:
        if program.cost is not None:
            lines += _gathered(workload, sharding, program.name, program.cost)
    step = next((p.cost for p in programs if p.name == "train step"), None)
    if step is not None:
        bound = roofline(step, topology, workload.run.model.compute_dtype)
        lines += _small_batch(workload, sharding, topology, step, bound)
    return lines


def _too_large(
    workload: Workload, topology: Topology, sharding: ShardingConfig, programs: Sequence[CompiledProgram]
) -> Iterator[Pathology]:
    """A train step that does not fit, with what would, by the estimate."""
    limit = topology.chip.hbm_bytes
    step = next((p for p in programs if p.name == "train step"), None)
    if step is None or (step.cost is not None and step.memory.total <= limit):
        return
    run, remedy = workload.run, "use more chips, or --sharding.fsdp"
    for factor in (1, 2, 4, 8):
        parts = run.training.accumulation * factor
        training, execution = replace(run.training, accumulation=parts), replace(run.execution, remat="layers")
        smaller = replace(workload, run=replace(run, training=training, execution=execution))
        if estimate(smaller, sharding)[1].total <= limit:
            remedy = "set --execution.remat layers" + (f" --training.accumulation {parts}" if factor > 1 else "")
            break
    yield Pathology("too large", f"the train step needs {step.memory.total / limit:.2f} times the memory", remedy)


def _padded_rows(workload: Workload, sharding: ShardingConfig) -> Iterator[Pathology]:
    padded = workload.padded(sharding).rows
    if padded > 1.05 * workload.rows:
        yield Pathology(
            "padded batch",
            f"its {workload.rows:,} rows are padded to {padded:,}, a multiple of devices times micro-batches",
            f"set --batches.tokens {padded * max(workload.src_length, workload.tgt_length)}",
        )


def _padded_dimensions(workload: Workload, sharding: ShardingConfig) -> Iterator[Pathology]:
    model, tensor = workload.run.model, sharding.tensor
    vocabularies = {model.src_vocab_size: "src_vocab_size", model.tgt_vocab_size: "tgt_vocab_size"}
    dimensions = [(name, size, "--tokenizer.vocab-size", tensor) for size, name in vocabularies.items()]
    dimensions += [("d_ff", model.d_ff, "--model.d-ff", tensor), ("d_model", model.d_model, "--model.d-model", 1)]
    for name, size, flag, parts in dimensions:
        multiple = LANES * parts
        if size % multiple:
            padded = math.ceil(size / multiple) * multiple
            share = "" if parts == 1 else f" on each of {parts} devices"
            yield Pathology(
                "padded dimension",
                f"{name}={size:,} is padded to a multiple of {LANES}{share}",
                f"set {flag} {padded}, or {padded - multiple}" if padded > multiple else f"set {flag} {padded}",
            )


def _narrow_heads(workload: Workload) -> Iterator[Pathology]:
    model = workload.run.model
    width = model.query_key_width(model.num_heads)
    if width < LANES and model.d_model >= LANES:
        yield Pathology(
            "narrow heads",
            f"heads of width {width} fill {width / LANES:.0%} of the matrix units in attention",
            f"set --model.num-heads {model.d_model // LANES}, which changes the model",
        )


def _gathered(workload: Workload, sharding: ShardingConfig, program: str, cost: Cost) -> Iterator[Pathology]:
    """All-gathers of what `tensor` should keep divided."""
    model = workload.run.model
    if sharding.tensor == 1:
        return
    tables = {(size, model.d_model) for size in (model.src_vocab_size, model.tgt_vocab_size)}
    remedy = f"set --sharding.tensor 1 --sharding.fsdp {sharding.tensor * sharding.fsdp}"
    gathered = {shape for c in cost.collectives if c.kind == "all-gather" for shape in c.shapes}
    for shape in sorted(gathered):
        if shape in tables or shape[::-1] in tables:
            yield Pathology(
                "re-materialized embedding",
                f"the {program} gathers the whole table {shape[0]}×{shape[1]} on every device",
                remedy,
            )
        elif model.tgt_vocab_size in shape and math.prod(shape) >= model.tgt_vocab_size * 2 and len(shape) > 1:
            dims = "×".join(map(str, shape))
            yield Pathology(
                "gathered logits",
                f"the {program} gathers logits {dims} of the whole vocabulary on every device",
                remedy,
            )


def _small_batch(
    workload: Workload, sharding: ShardingConfig, topology: Topology, cost: Cost, bound: Bound
) -> Iterator[Pathology]:
    if bound.limit != "links":
        return
    busy = max(bound.matrix_units, bound.hbm)
    within = [c for c in cost.collectives if sharding.tensor > 1 and c.group == sharding.tensor]
    activations = sum(topology.seconds(c.sent, c.group) for c in within)
    if activations > bound.links / 2:
        yield Pathology(
            "too much communication within layers",
            f"communication takes {bound.links / busy:.1f} times as long as the rest, mostly all-reduces over tensor",
            f"set --sharding.tensor {max(sharding.tensor // 2, 1)}",
        )
        return
    tokens = workload.rows * max(workload.src_length, workload.tgt_length)
    yield Pathology(
        "batch too small for the links",
        f"communication takes {bound.links / busy:.1f} times as long as the rest, mostly the gradient all-reduce",
        f"set --batches.tokens {math.ceil(tokens * bound.links / busy / 1000) * 1000} or more, or use fewer chips",
    )
