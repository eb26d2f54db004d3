"""What the processes of a run tell each other in every update: checksums of their rows, and whether one must stop."""

from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..step.partitioning import Placement
from .process_group import ProcessGroup


class StepSummary(NamedTuple):
    """The same in every process. The numbers may be on the devices: reading one waits for them."""

    signal: Any  # a signal to stop that a process has caught; 0: none
    checksum: Any  # of the batch


class Exchange:
    """The maximum of the signals and the sum of the checksums of all processes, compiled before a process waits."""

    def __init__(self, placement: Placement, group: ProcessGroup):
        self._alone = group.count == 1
        if self._alone:
            return
        mesh = placement.mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size, 2)
        everywhere = NamedSharding(mesh, PartitionSpec())

        def combine(summary: jax.Array) -> StepSummary:
            return StepSummary(summary[:, 0].max(), summary[:, 1].sum(dtype=jnp.uint32))

        self._combine = jax.jit(combine, out_shardings=everywhere).lower(self._array(StepSummary(0, 0))).compile()
        group.barrier("the programs are compiled")

    def __call__(self, summary: StepSummary) -> StepSummary:
        """The largest signal and the sum of the checksums of all processes."""
        return summary if self._alone else self._combine(self._array(summary))

    def _array(self, summary: StepSummary) -> jax.Array:
        """A row per device, of which one in each process has the numbers."""
        first = min(device.id for device in jax.local_devices())

        def row(device: Any) -> np.ndarray:
            return np.array([summary if device.id == first else (0, 0)], np.uint32)

        devices = self._sharding.addressable_devices
        rows = [jax.device_put(row(device), device) for device in devices]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, rows)


def checksum(numbers: np.ndarray, src_tokens: np.ndarray, labels: np.ndarray) -> int:
    """A sum over rows, so that processes can add theirs: it identifies the pairs of a batch and their places.

    `numbers` are the positions of the rows in the whole batch.
    """
    rows = zip(np.asarray(numbers, "<i4"), src_tokens.astype("<i4"), labels.astype("<i4"), strict=True)
    return sum(crc32(b"".join(map(np.ndarray.tobytes, map(np.asarray, row)))) for row in rows) % 2**32
