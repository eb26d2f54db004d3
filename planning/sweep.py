"""Ranks the meshes of topologies by an estimate of their time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..backend.errors import ConfigError
from ..configs.sharding import ShardingConfig
from .cost import Cost, Memory
from .estimate import estimate
from .flops import model_flops
from .roofline import Bound, roofline
from .topology import Topology
from .workload import Workload


@dataclass(frozen=True)
class Candidate:
    """A mesh of a topology with its estimate, or why it is not possible."""

    topology: Topology
    sharding: ShardingConfig
    obstacle: str | None
    cost: Cost | None = None
    memory: Memory | None = None
    bound: Bound | None = None

    @property
    def seconds(self) -> float:
        """The estimated time of an update; infinite if the mesh is not possible."""
        return float("inf") if self.bound is None or self.obstacle else self.bound.seconds

    @property
    def rank(self) -> tuple[float, float]:
        """Lower is better: the time if everything overlaps, then the time if nothing does."""
        return self.seconds, 0.0 if self.bound is None else self.bound.without_overlap


def meshes(devices: int) -> Iterator[ShardingConfig]:
    """All meshes of a number of devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor in divisors:
        for fsdp in (n for n in divisors if devices // tensor % n == 0):
            yield ShardingConfig(data=devices // tensor // fsdp, fsdp=fsdp, tensor=tensor)


def consider(workload: Workload, topology: Topology, sharding: ShardingConfig) -> Candidate:
    """The estimate of a mesh."""
    try:
        workload.check(sharding, topology.chips)
    except ConfigError as error:
        return Candidate(topology, sharding, str(error))
    cost, memory = estimate(workload, sharding)
    bound = roofline(cost, topology, workload.run.model.compute_dtype)
    excess = memory.total - topology.chip.hbm_bytes
    obstacle = f"needs {excess / 1e9:.1f} GB more than a chip has" if excess > 0 else None
    return Candidate(topology, sharding, obstacle, cost, memory, bound)


def rank(workload: Workload, topologies: Sequence[Topology]) -> list[Candidate]:
    """All meshes of some topologies, the fastest first; the impossible ones last."""
    candidates = [consider(workload, t, sharding) for t in topologies for sharding in meshes(t.chips)]
    return sorted(candidates, key=lambda candidate: candidate.rank)


def utilization(workload: Workload, topology: Topology, bound: Bound) -> float:
    """The upper bound on the model FLOPs utilization; rows of padding are no work of the model."""
    flops = model_flops(workload.run.model, workload.rows_of_passes, workload.src_length, workload.tgt_length)
    return bound.utilization(flops / topology.chips, topology.chip.peak(workload.run.model.compute_dtype))
