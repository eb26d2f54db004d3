"""What one run of a compiled program costs a device: FLOPs, bytes of its memory, and bytes sent to other devices.

XLA's own `cost_analysis` counts the body of a loop once. Here it counts as often as the loop runs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ..flax_transformer.xla_cpu.products import ROW_SUMS
from .hlo import ArrayType, Computation, Instruction, Program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# they move no data, or their data counts where it is produced
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"partition-id", "replica-id", "optimization-barrier", "iota", "domain", "custom-call", "add-dependency"}
_Key = tuple[str, int, tuple[tuple[int, ...], ...], int]  # a collective without its count
_SLICES = {"slice", "dynamic-slice", "gather"}


@dataclass(frozen=True)
class Collective:
    """A collective operation, as often as the program runs it."""

    kind: str
    group: int  # devices that take part
    shapes: tuple[tuple[int, ...], ...]  # of its results
    bytes: int  # of the complete array: an all-gather's result, a reduce-scatter's operand
    count: float  # runs

    @property
    def sent(self) -> float:
        """Bytes that each device must send at least.

        n devices, complete array of b bytes: all-reduce 2 · b · (n - 1) / n; collective-permute b; others
        b · (n - 1) / n.

        Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
        """
        if self.kind == "collective-permute":
            return self.count * self.bytes
        return self.count * self.bytes * (self.group - 1) / self.group * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a program on one device."""

    flops: float  # of matrix products and convolutions
    hbm_bytes: float  # read and written by its instructions; of a program for a CPU, an estimate for no other device
    collectives: tuple[Collective, ...] = field(default=())

    @property
    def sent(self) -> float:
        """Bytes that the device must send."""
        return sum(c.sent for c in self.collectives)


@dataclass(frozen=True)
class Memory:
    """Bytes that a program needs on a device."""

    arguments: int  # of an update: parameters, optimizer state and batch
    temporaries: int
    code: int = 0
    results: int = 0  # those that take no argument's place

    @property
    def total(self) -> int:
        """Their sum, which must be below the device's memory."""
        return self.arguments + self.temporaries + self.code + self.results


def cost(program: Program, unknown_trips: float = 1) -> Cost:
    """The cost of one run. A loop whose condition depends on data counts as `unknown_trips` runs of its body."""
    flops, hbm_bytes = 0.0, 0.0
    collectives: Counter[_Key] = Counter()
    for name, runs in _runs(program, unknown_trips).items():
        computation = program.computations[name]
        flops += runs * _flops(program, computation)
        for instruction in computation.values():
            hbm_bytes += runs * _bytes(program, computation, instruction)
        for collective in _collectives(program, computation, fused=False):
            collectives[collective] += runs  # type: ignore[assignment]
    parts = (Collective(*key, count=count) for key, count in collectives.items())
    return Cost(flops, hbm_bytes, tuple(parts))


def _runs(program: Program, unknown_trips: float) -> dict[str, float]:
    """How often each computation runs that is not part of a fusion."""
    runs: Counter[str] = Counter()

    def visit(name: str, times: float) -> None:
        runs[name] += times  # type: ignore[assignment]
        for instruction in program.computations[name].values():
            for called, each in _called(program, instruction, unknown_trips):
                visit(called, times * each)

    visit(program.entry, 1.0)
    return dict(runs)


def _called(program: Program, instruction: Instruction, unknown_trips: float) -> Iterator[tuple[str, float]]:
    if instruction.opcode == "while":
        trips = trip_count(program, instruction)
        trips = unknown_trips if trips is None else trips
        for attribute in ("body", "condition"):
            if (name := instruction.called(attribute)) is not None:
                yield name, trips
    elif instruction.opcode == "conditional":
        branches = re.findall(r"%([\w.-]+)", instruction.attribute("branch_computations") or "")
        branches += [b for a in ("true_computation", "false_computation") if (b := instruction.called(a))]
        yield from ((branch, 1.0) for branch in branches)  # an upper bound: one of them runs
    elif instruction.opcode in ("call", "async-start"):
        name = instruction.called("to_apply") or instruction.called("calls")
        if name is not None:
            yield name, 1.0


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often a loop runs; None if its condition is no comparison of a counter with a constant.

    `jax.lax.scan` and `fori_loop` count from 0 in steps of 1, which is assumed.
    """
    if (known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)) is not None:
        return int(known[1])
    condition = program.computations[loop.called("condition") or ""]
    root = next(i for i in condition.values() if i.is_root)
    if root.opcode == "fusion":
        inner = program.computations[root.called("calls") or ""]
        comparison = next(i for i in inner.values() if i.is_root)
        numbers = [
            _through(condition, root.operands[int(i.literal)]) for i in inner.values() if i.opcode == "parameter"
        ]
        numbers += list(inner.values())
    else:
        comparison, numbers = root, [condition[name] for name in root.operands]
    if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes:
        return None
    constants = [int(i.literal) for i in numbers if i.opcode == "constant" and re.fullmatch(r"\d+", i.literal)]
    return constants[0] if len(constants) == 1 else None


def _through(computation: Computation, name: str) -> Instruction:
    """The instruction of a name, through copies."""
    while computation[name].opcode in ("copy", "bitcast"):
        name = computation[name].operands[0]
    return computation[name]


def _flops(program: Program, computation: Computation) -> float:
    """FLOPs of a computation's products, those in its fusions included; what it calls is not."""
    total = 0.0
    for instruction in computation.values():
        if instruction.opcode == "dot":
            if f"/{ROW_SUMS}/" in instruction.attributes:
                continue  # only a CPU's program has these products, which sum rows
            left = computation[instruction.operands[0]].types[0].dims
            contracted = math.prod(left[d] for d in instruction.dims_of("lhs_contracting_dims"))
            total += 2 * instruction.types[0].elements * contracted
        elif instruction.opcode == "convolution":
            left, right = (computation[name].types[0] for name in instruction.operands[:2])
            total += _convolution_flops(instruction, left, right)
        elif instruction.opcode == "fusion" and (name := instruction.called("calls")) is not None:
            total += _flops(program, program.computations[name])
    return total


def _convolution_flops(instruction: Instruction, left: ArrayType, right: ArrayType) -> float:
    """2 · output features · input features of the kernel · batch · pairs of positions that meet.

    XLA for TPUs writes products as convolutions, their batch dimensions as spatial ones.
    """
    labels = instruction.attribute("dim_labels") or ""
    inputs, kernel, outputs = re.split("_|->", labels)
    out = instruction.types[0].dims
    flops = 2 * out[outputs.index("f")] * right.dims[kernel.index("i")] * out[outputs.index("b")]
    window = instruction.attribute("window") or ""
    settings = dict(re.findall(r"(\w+)=([^\s{}]+)", window))
    spatial = sorted(label for label in inputs if label.isdigit())

    def setting(name: str, default: str) -> list[str]:
        return settings.get(name, "x".join([default] * len(spatial))).split("x")

    values = zip(
        *(setting("size", "1"), setting("stride", "1"), setting("pad", "0_0")),
        *(setting("lhs_dilate", "1"), setting("rhs_dilate", "1")),
        strict=True,
    )
    for label, (size, stride, pad, base, dilation) in zip(spatial, values, strict=True):
        ends = left.dims[inputs.index(label)], out[outputs.index(label)]
        flops *= _pairs(*ends, int(size), int(stride), int(pad.split("_")[0]), int(base), int(dilation))
    return float(flops)


@lru_cache(maxsize=1024)
def _pairs(length: int, out: int, size: int, stride: int, pad: int, base: int, dilation: int) -> int:
    """Pairs of an output position and a kernel position that meet a value, not padding."""
    positions = np.arange(out)[:, None] * stride - pad + np.arange(size) * dilation
    return int(((positions >= 0) & (positions % base == 0) & (positions // base < length)).sum())


def _bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Bytes of the device's memory that an instruction reads and writes."""
    opcode, types = instruction.opcode, instruction.types
    if opcode in _FREE or opcode.endswith(("-done", "-update")) or opcode.startswith(KINDS):
        return 0  # collectives count as communication
    if opcode == "slice-start":  # ((whole operand), slice, context)
        return types[1].bytes * (types[0].in_hbm + types[1].in_hbm)
    if opcode == "copy-start":  # (copy, operand, context)
        return types[0].bytes * (types[0].in_hbm + types[1].in_hbm)
    if opcode in _SLICES:
        return sum(2 * t.bytes for t in types if t.in_hbm)
    inner = program.computations[instruction.called("calls") or ""] if opcode == "fusion" else {}
    operands = [computation[name] for name in instruction.operands]
    if opcode == "dynamic-update-slice":
        return 2 * operands[1].types[0].bytes * types[0].in_hbm
    slices = _updated(inner)
    written = sum(slices.get(number, t.bytes) for number, t in enumerate(types) if t.in_hbm)
    changed = {target for target in (_target(inner, number) for number in slices) if target is not None}
    read = sum(_read(inner, number, operand) for number, operand in enumerate(operands) if number not in changed)
    return written + read


def _results(inner: Computation) -> list[Instruction]:
    """The instructions that compute the results of a fusion."""
    root = next((i for i in inner.values() if i.is_root), None)
    if root is None:
        return []
    return [_through(inner, name) for name in (root.operands if root.opcode == "tuple" else (root.name,))]


def _updated(inner: Computation) -> dict[int, int]:
    """Bytes of the slices that a fusion writes into arrays in place, by the number of the result."""
    return {
        number: inner[result.operands[1]].types[0].bytes
        for number, result in enumerate(_results(inner))
        if result.opcode == "dynamic-update-slice"
    }


def _target(inner: Computation, number: int) -> int | None:
    """The operand of a fusion that is changed in place."""
    target = _through(inner, _results(inner)[number].operands[0])
    return int(target.literal) if target.opcode == "parameter" else None


def _read(inner: Computation, number: int, operand: Instruction) -> int:
    """Bytes read of an operand: of one that a fusion only slices, the slices."""
    if not operand.types or not operand.types[0].in_hbm or operand.opcode in ("tuple", "while"):
        return 0
    whole = operand.types[0].bytes
    parameter = next((i for i in inner.values() if i.opcode == "parameter" and i.literal == str(number)), None)
    if parameter is None:
        return whole
    users = [i for i in inner.values() if parameter.name in i.operands]
    if users and all(user.opcode in _SLICES and user.operands[0] == parameter.name for user in users):
        return min(whole, sum(user.types[0].bytes for user in users))
    return whole


def _collectives(program: Program, computation: Computation, fused: bool) -> Iterator[_Key]:
    """Those of a computation, and of its fusions.

    XLA for TPUs writes a reduce-scatter as a fusion of an all-reduce and dynamic slices of its results.
    """
    scatters = fused and any(i.opcode == "dynamic-slice" for i in computation.values())
    for instruction in computation.values():
        if (key := _collective(computation, instruction)) is not None:
            yield ("reduce-scatter", *key[1:]) if scatters and key[0] == "all-reduce" else key
        elif instruction.opcode == "fusion" and (name := instruction.called("calls")) is not None:
            yield from _collectives(program, program.computations[name], fused=True)


def _collective(computation: Computation, instruction: Instruction) -> _Key | None:
    """(kind, devices per group, shapes of the results, bytes of the complete arrays); None if it is no collective."""
    opcode = instruction.opcode
    kind = next((k for k in KINDS if opcode in (k, f"{k}-start")), None)
    if kind is None:
        return None
    operands = [t for name in instruction.operands for t in computation[name].types[:1]]
    group, total = _group(instruction), sum(t.bytes for t in operands)
    if kind == "all-gather":
        return kind, group, tuple(t.dims for t in instruction.types if t.dims), total * group
    if "promoted" in (instruction.called("to_apply") or ""):
        total //= 2  # a CPU adds 16-bit numbers in float32; other devices send 16 bits
    return kind, group, tuple(t.dims for t in operands), total


def _group(instruction: Instruction) -> int:
    """Devices per group of a collective; all three notations of `replica_groups`."""
    text = instruction.attributes
    if (lists := re.search(r"replica_groups=\{\{([\d,]*)\}", text)) is not None:
        return len(lists[1].split(","))
    if (iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text)) is not None:
        return int(iota[1])
    if (mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", text)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if (pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text)) is not None:
        return max(pairs[1].count("{"), 1)
    return 1
