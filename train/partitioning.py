"""Where arrays stand: the devices of a run as a mesh of one axis, `data`.

Rows of a batch are split over it; parameters, optimiser state and everything else are on every device.
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
        """The whole of every array on each device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def split(self, padded: Sequence[np.ndarray], pad_id: int, parts: int) -> Batch:
        """A batch, a part of its rows on each device; padded to rows that all devices and `parts` share evenly."""
        more = -len(padded[0]) % (self._mesh.size * parts)
        arrays = [np.pad(a, ((0, more), (0, 0)), constant_values=pad_id) for a in padded]
        rows = np.arange(len(arrays[0]), dtype=np.int32)
        return Batch(*jax.device_put((*arrays, rows), NamedSharding(self._mesh, PartitionSpec("data"))))


def like(tree: Any, template: Any) -> Any:
    """The arrays of a tree, each where its template's is."""
    return jax.device_put(tree, jax.tree.map(lambda array: array.sharding, template))


def on_one_device(shapes: Any) -> Any:
    """Abstract arrays on the first device, to read a checkpoint onto."""
    place = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
