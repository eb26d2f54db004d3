"""The mesh of a run's devices, and where its arrays are: the table PARTITIONS of parameter names.

The rows of a batch are divided over the axes `data` and `fsdp`, parameters and their optimizer state over `fsdp` and
`tensor`; XLA's partitioner derives the rest. Letters: D d_model, V vocabulary, F feed-forward width.
Source: Xu et al. 2021, "GSPMD"; Shazeer et al. 2018, "Mesh-TensorFlow", for the dimensions.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...backend.errors import ConfigError
from ...configs.schema import TransformerConfig
from ...configs.sharding import ShardingConfig

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
        # neighbors in the mesh are neighbors in a TPU's network
        return cls(
            Mesh(create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True), tuple(sizes))
        )

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

    def divide(self, array: np.ndarray) -> jax.Array:
        """An array, which every process has, with its rows divided over the devices; their number must allow it."""
        return _put(array, self.row_sharding)

    @property
    def row_sharding(self) -> NamedSharding:
        """The sharding of an array that has the rows of a batch."""
        return NamedSharding(self.mesh, _ROWS)

    @property
    def shares(self) -> int:
        """The number of parts of a batch that are on different devices."""
        return self.config.data * self.config.fsdp

    def shardings(self, tree: Any) -> Any:
        """The sharding of every array in a tree, from the name of its parameter."""
        return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(self.mesh, partition(path)), tree)

    def abstract(self, tree: Any) -> Any:
        """The shapes, dtypes and shardings of the arrays of a tree, which may be abstract."""

        def describe(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        return jax.tree.map(describe, tree, self.shardings(tree))

    def place(self, tree: Any) -> Any:
        """Put every array of a tree where the table says; every process passes the same arrays."""
        return _put(tree, self.shardings(tree))

    def keep(self, tree: Any) -> Any:
        """In a jitted function: the tree, whose arrays stay where the table says."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def gather(self, params: Any) -> Any:
        """In a jitted function: the parameters, complete along `fsdp`, so that it divides nothing but rows."""

        def sharding(path: Sequence[Any], array: Any) -> NamedSharding:
            return NamedSharding(self.mesh, PartitionSpec(*(None if a == "fsdp" else a for a in partition(path))))

        return jax.lax.with_sharding_constraint(params, jax.tree_util.tree_map_with_path(sharding, params))

    def rows(self, sentences: int, parts: int) -> "Rows":
        """The rows of a batch that this process holds; the batch is padded to a multiple of `shares` · `parts` rows."""
        total = sentences + -sentences % (self.shares * parts)
        places = self.row_sharding.devices_indices_map((total,))
        owners = np.full(total, jax.process_count())  # the first process that holds a row
        for device, (part,) in places.items():
            owners[part] = np.minimum(owners[part], device.process_index)
        parts_here = [part for device, (part,) in places.items() if device.process_index == jax.process_index()]
        here = np.unique(np.concatenate([np.arange(total)[part] for part in parts_here]))
        return Rows(total, here, (owners[here] == jax.process_index()) & (here < sentences))

    def put_rows(self, arrays: Sequence[np.ndarray], rows: "Rows") -> tuple[jax.Array, ...]:
        """Arrays of a batch, and the numbers of its rows, divided over the devices; given are the rows held here."""
        sharding = self.row_sharding

        def put(array: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                return array[np.searchsorted(rows.here, np.arange(rows.total)[index[0]])]

            return jax.make_array_from_callback((rows.total, *array.shape[1:]), sharding, part)

        return tuple(put(array) for array in (*arrays, rows.here.astype(np.int32)))

    def abstract_rows(self, rows: int, src_length: int, tgt_length: int) -> tuple[Any, ...]:
        """The shapes of what `put_rows` returns: sources, targets, labels and the numbers of the rows."""
        shapes = (rows, src_length), (rows, tgt_length), (rows, tgt_length), (rows,)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.row_sharding) for shape in shapes)

    def split(self, padded: Sequence[np.ndarray], pad_id: int, parts: int) -> tuple[jax.Array, ...]:
        """Arrays of a whole batch, padded with rows of padding, and the numbers of its rows, divided as `put_rows`."""
        rows = self.rows(len(padded[0]), parts)
        extra = rows.total - len(padded[0])
        arrays = [np.pad(a, ((0, extra), (0, 0)), constant_values=pad_id)[rows.here] for a in padded]
        return self.put_rows(arrays, rows)


class Rows(NamedTuple):
    """Which rows of a batch a process holds."""

    total: int  # of the batch on all devices, rows of padding included
    here: np.ndarray  # numbers of the rows of this process, ascending
    own: np.ndarray  # for each of them, whether it is no padding and no earlier process holds it too


def _put(tree: Any, shardings: Any) -> Any:
    """Put arrays, which every process has, on the devices of all processes."""

    def put(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        values = np.asarray(array)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(put, tree, shardings)


def partition(path: Sequence[Any]) -> PartitionSpec:
    """The axes of an array's dimensions, by the last name in its path: parameters and their moments have one."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    name = str(names[-1]) if names else ""
    return next(spec for pattern, spec in PARTITIONS if re.fullmatch(pattern, name))


def device_put_like(tree: Any, template: Any) -> Any:
    """Move each array of a tree to the sharding of the template's array."""
    return _put(tree, jax.tree.map(lambda array: array.sharding, template))


def on_one_device(shapes: Any) -> Any:
    """Abstract arrays on the first device, as the target for restoring a checkpoint."""
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)


def describe_devices(kinds: Sequence[str], sharding: ShardingConfig, processes: int = 1) -> str:
    """One line on the devices, the axes of the mesh, and how the devices share the rows of a batch."""
    if len(kinds) == 1:
        return f"device: {kinds[0]}"
    names = ", ".join(f"{count} × {kind}" for kind, count in Counter(kinds).items())
    names += f" in {processes} processes" if processes > 1 else ""
    shares = sharding.data * sharding.fsdp
    rows = f"each computes 1/{shares} of the rows of a batch" if shares > 1 else "each computes all rows of a batch"
    return f"devices: {names}; {sharding}; {rows}"
