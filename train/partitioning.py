"""The mesh of a run's devices, and where its arrays are: the table PARTITIONS of parameter names.

The rows of a batch are divided over the axes `data` and `fsdp`, parameters and their optimizer state over `fsdp` and
`tensor`; XLA's partitioner derives the rest. Letters: D d_model, V vocabulary, F feed-forward width.
Source: Xu et al. 2021, "GSPMD"; Shazeer et al. 2018, "Mesh-TensorFlow", for the dimensions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..configs.errors import ConfigError
from ..configs.schema import TransformerConfig
from ..configs.sharding import ShardingConfig

# pattern of the whole name -> axis of each dimension; the first that matches
PARTITIONS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(src|tgt)_embedding\.embedding", PartitionSpec("tensor", "fsdp")),  # (V, D)
    (r".*\.[qkv]_proj\.kernel", PartitionSpec("fsdp", "tensor")),  # (D, heads)
    (r".*\.(inner|gate)_proj\.kernel", PartitionSpec("fsdp", "tensor")),  # (D, F)
    (r".*\.(out|outer)_proj\.kernel", PartitionSpec("tensor", "fsdp")),  # (heads or F, D)
    (r"output\.proj\.kernel", PartitionSpec("fsdp", "tensor")),  # (D, V)
    (r".*\.([qkv]|inner|gate)_proj\.bias", PartitionSpec("tensor")),
    (r"output\.bias", PartitionSpec("tensor")),
    (r".*relative_positions\.embedding", PartitionSpec(None, "tensor")),  # (buckets, heads)
    (r".*", PartitionSpec()),  # norms, other biases, tables of positions, counts
)
_ROWS = PartitionSpec(("data", "fsdp"))


@dataclass(frozen=True)
class Placement:
    """Puts arrays on the devices of a mesh."""

    mesh: Mesh

    @classmethod
    def of(cls, config: ShardingConfig, model: TransformerConfig, devices: Sequence[Any] | None = None) -> "Placement":
        """The placement of a config on these devices, by default all.

        Raises:
            ConfigError: the axes do not fit the devices, or not the model.
        """
        devices = jax.devices() if devices is None else devices
        config.check(model, len(devices))
        sizes = config.sizes(len(devices))
        return cls(Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes)))

    @property
    def config(self) -> ShardingConfig:
        """The axes, all with their sizes."""
        return ShardingConfig(**self.mesh.shape)

    def check_rows(self, rows: int) -> None:
        """Raises: ConfigError if a batch of this many rows leaves a device without any."""
        if rows < self.shares:
            raise ConfigError(
                f"data={self.config.data}, fsdp={self.config.fsdp}: divide the rows of a batch into {self.shares} "
                f"shares, and the smallest batch has {rows} rows; set larger --batches.tokens, or use fewer devices"
            )

    @property
    def shares(self) -> int:
        """The number of parts of a batch that are on different devices."""
        return self.config.data * self.config.fsdp

    def shardings(self, tree: Any) -> Any:
        """The sharding of every array in a tree, from the name of its parameter."""
        return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(self.mesh, partition(path)), tree)

    def place(self, tree: Any) -> Any:
        """Puts every array of a tree where the table says."""
        return jax.device_put(tree, self.shardings(tree))

    def keep(self, tree: Any) -> Any:
        """In a jitted function: the tree, whose arrays stay where the table says."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def gather(self, params: Any) -> Any:
        """In a jitted function: the parameters, complete along `fsdp`, so that it divides nothing but rows."""

        def sharding(path: Sequence[Any], array: Any) -> NamedSharding:
            return NamedSharding(self.mesh, PartitionSpec(*(None if a == "fsdp" else a for a in partition(path))))

        return jax.lax.with_sharding_constraint(params, jax.tree_util.tree_map_with_path(sharding, params))

    def split(self, padded: Sequence[np.ndarray], pad_id: int, parts: int) -> tuple[jax.Array, ...]:
        """Arrays of a batch and the numbers of its rows, divided over the devices.

        The number of rows is padded to a multiple of their shares times `parts`.
        """
        padding_rows = -len(padded[0]) % (self.shares * parts)
        arrays = [np.pad(a, ((0, padding_rows), (0, 0)), constant_values=pad_id) for a in padded]
        rows = np.arange(len(arrays[0]), dtype=np.int32)
        return jax.device_put((*arrays, rows), NamedSharding(self.mesh, _ROWS))


def partition(path: Sequence[Any]) -> PartitionSpec:
    """The axes of an array's dimensions, by the last name in its path: parameters and their moments have one."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    name = str(names[-1]) if names else ""
    return next(spec for pattern, spec in PARTITIONS if re.fullmatch(pattern, name))


def like(tree: Any, template: Any) -> Any:
    """Moves each array of a tree to the sharding of the template's array."""
    return jax.device_put(tree, jax.tree.map(lambda array: array.sharding, template))


def on_one_device(shapes: Any) -> Any:
    """Abstract arrays on the first device, as the target for restoring a checkpoint."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)
