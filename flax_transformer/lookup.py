"""Rows of a table, with a gradient that XLA computes fast on a GPU.

The gradient adds the rows of equal numbers: a scatter. With deterministic operations, XLA sorts every single element of
it on a GPU, in about 100 kernels. So the rows are sorted there, and a segmented scan adds up each run of equal numbers,
in a fixed order. CPUs and TPUs use the scatter of JAX, and so do several GPUs: the sort would gather the rows of the
whole batch on every device. The two forms add in different orders, so their sums differ by rounding, most in bfloat16
and float16.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from .transposition import linear


@jax.custom_jvp
def rows(table: Float[Array, "V D"], numbers: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    """The rows of a table with these numbers, negative ones from the end as in numpy; NaN for one outside the table."""
    return _rows(numbers, table, count=len(table))


def _rows(numbers: Array, table: Array, *, count: int) -> Array:
    return jnp.take(table, numbers, axis=0, mode="fill")


def _gradient(numbers: Array, gradient: Array, *, count: int) -> Array:
    # A scan needs to know its length, and a sort would gather a sharded batch.
    if any(map(is_symbolic_dim, numbers.shape)) or jax.device_count() > 1:
        return _scatter(count, numbers, gradient)
    on_gpu = partial(sum_runs, count=count)
    return jax.lax.platform_dependent(numbers, gradient, cuda=on_gpu, rocm=on_gpu, default=partial(_scatter, count))


def _scatter(count: int, numbers: Array, gradient: Array) -> Array:
    table = jax.ShapeDtypeStruct((count, gradient.shape[-1]), gradient.dtype)
    return jax.linear_transpose(lambda table: _rows(numbers, table, count=count), table)(gradient)[0]


def sum_runs(numbers: Int[Array, "B L"], gradient: Float[Array, "B L D"], count: int) -> Float[Array, "V D"]:
    """The sums of the rows of equal numbers, at these numbers; those outside the table are left out."""
    numbers = numbers.reshape(-1).astype(jnp.promote_types(numbers.dtype, jnp.int32))  # `unused` has to fit
    numbers = jnp.where(numbers < 0, numbers + count, numbers)
    order = jnp.argsort(numbers)
    numbers = numbers[order]
    begins = (jnp.arange(len(numbers)) == 0) | (numbers != jnp.roll(numbers, 1))
    sums, _ = jax.lax.associative_scan(_add, (gradient.reshape(-1, gradient.shape[-1])[order], begins[:, None]))
    ends = jnp.roll(begins, -1)
    unused = count + jnp.arange(len(numbers), dtype=numbers.dtype)  # different, as `unique_indices` promises
    targets = jnp.where(ends & (numbers >= 0) & (numbers < count), numbers, unused)
    return jnp.zeros((count, sums.shape[-1]), sums.dtype).at[targets].set(sums, mode="drop", unique_indices=True)


def _add(
    left: tuple[Float[Array, "N D"], Bool[Array, "N 1"]], right: tuple[Float[Array, "N D"], Bool[Array, "N 1"]]
) -> tuple[Float[Array, "N D"], Bool[Array, "N 1"]]:
    """(sum since the last begin of a run, whether there was one) of two neighbouring parts."""
    return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]


_linear_in_table = linear(_rows, _gradient)


@rows.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    table, numbers = primals
    return rows(table, numbers), _linear_in_table(numbers, tangents[0], count=len(table))
