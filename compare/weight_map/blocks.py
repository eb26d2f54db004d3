"""Blocks of parameters that are decided as one, and which values of a trace depend on them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ..capture.trace import Operation, Trace
from ..matching.arrangements import Layout

Array = np.ndarray


@dataclass(frozen=True)
class Block:
    """A region of a parameter that is decided as one: all of it, a layer of a stack, or a part of a packed one."""

    name: str
    row: tuple[int, ...]  # leading indices into the parameter: the steps of scans
    region: tuple[slice, ...]  # of what these indices leave
    numbers: tuple[int, ...]  # the values that hold what these indices leave

    @property
    def key(self) -> str:
        """A unique name."""
        inner = ",".join(f"{part.start}:{part.stop}" for part in self.region)
        return f"{self.name}[{','.join(map(str, self.row))}][{inner}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The region's shape."""
        return tuple(part.stop - part.start for part in self.region)

    def start(self, shape: Sequence[int]) -> int:
        """Flat index of the block's row in a parameter of this shape."""
        return sum(i * prod(shape[axis + 1 :]) for axis, i in enumerate(self.row))


def blocks(trace: Trace, names: Iterable[str]) -> dict[str, Block]:
    """One block per parameter, or per row of one that scans alone use."""
    numbers = {trace.parameters[name]: name for name in reversed(list(names))}
    users_of = users(trace)
    entries: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    pending = [(name, (), number) for number, name in numbers.items()]
    while pending:
        name, row, number = pending.pop()
        own = users_of.get(number, [])
        if own and all(operation.name == "scan.row" for operation in own):
            pending += [(name, (*row, operation.settings["row"]), operation.outputs[0]) for operation in own]
        else:
            entries.setdefault((name, row), []).append(number)
    whole = {at: tuple(slice(0, n) for n in trace.values[places[0]].shape) for at, places in entries.items()}
    blocks = (Block(*at, whole[at], tuple(places)) for at, places in sorted(entries.items()))
    return {block.key: block for block in blocks}


def users(trace: Trace) -> dict[int, list[Operation]]:
    """The operations that use each value."""
    users: dict[int, list[Operation]] = {}
    for operation in trace.operations:
        for number in operation.inputs:
            users.setdefault(number, []).append(operation)
    return users


class Dependencies:
    """Which blocks each value of a trace depends on, as bits."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.bits: dict[str, int] = {}
        self.known: dict[int, int] = {}  # found by changing blocks, where fewer matter than the operations use
        self.masks: list[int] = []

    def update(self, open_blocks: Mapping[str, Block]) -> None:
        """Compute the masks of all values."""
        masks, open_mask = [0] * len(self.trace.values), 0
        for key, block in open_blocks.items():
            bit = self.bits.setdefault(key, 1 << len(self.bits))
            open_mask |= bit
            for number in block.numbers:
                masks[number] |= bit
        for operation in self.trace.operations:
            mask = 0
            for number in operation.inputs:
                mask |= masks[number]
            for number in operation.outputs:
                masks[number] |= mask & self.known.get(number, mask) & open_mask
        self.masks = masks

    def keys(self, mask: int) -> tuple[str, ...]:
        """The blocks of a mask."""
        return tuple(key for key, bit in self.bits.items() if bit & mask)


def live_values(trace: Trace) -> set[int]:
    """Values that depend on the inputs."""
    live = set(trace.inputs.values())
    for operation in trace.operations:
        if not live.isdisjoint(operation.inputs):
            live.update(operation.outputs)
    return live


@lru_cache(maxsize=65536)
def elements(layout: Layout) -> Array:
    """Flat indices into the source."""
    return np.ravel(layout.apply(np.arange(layout.source_size)))


def used_repeatedly(trace: Trace, sources: Mapping[str, Block]) -> set[str]:
    """Sources that several operations use, or that have several names, such as tied embeddings."""
    counts: dict[int, int] = {}
    for operation in trace.operations:
        for number in set(operation.inputs):
            counts[number] = counts.get(number, 0) + 1
    return {key for key, block in sources.items() if sum(counts.get(n, 0) for n in block.numbers) > 1}
