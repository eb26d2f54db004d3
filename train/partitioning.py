"""Data parallelism: the devices of a run as a mesh with one axis, `data`.

The rows of a batch are split over it; parameters, optimizer state and everything else are replicated.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .step import Batch


class Placement:
    """Puts arrays on the devices of this process."""

    def __init__(self) -> None:
        self._mesh = Mesh(np.array(jax.devices()), ("data",))

    def replicate(self, tree: Any) -> Any:
        """Copies every array to each device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def split(self, padded: Sequence[np.ndarray], pad_id: int, parts: int) -> Batch:
        """A batch whose rows are split over the devices, padded to a multiple of devices times `parts` rows."""
        padding_rows = -len(padded[0]) % (self._mesh.size * parts)
        arrays = [np.pad(a, ((0, padding_rows), (0, 0)), constant_values=pad_id) for a in padded]
        rows = np.arange(len(arrays[0]), dtype=np.int32)
        return Batch(*jax.device_put((*arrays, rows), NamedSharding(self._mesh, PartitionSpec("data"))))


def like(tree: Any, template: Any) -> Any:
    """Moves each array of a tree to the sharding of the template's array."""
    return jax.device_put(tree, jax.tree.map(lambda array: array.sharding, template))


def on_one_device(shapes: Any) -> Any:
    """Abstract arrays on the first device, as the target for restoring a checkpoint."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)
