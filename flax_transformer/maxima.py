"""Softmax and beam search's top-k, with maxima in a form that XLA computes fast on a CPU.

XLA compares floats one by one, because a NaN must not be lost, but integers as vectors. So float32 numbers are compared
as integers of the same order. Wide axes are divided into short blocks, whose comparisons XLA unrolls.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 16


def row_max(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """The maximum over the last axis, without a gradient; NaNs with a sign bit may be ignored."""
    return _maxima(jax.lax.stop_gradient(x), _row_max, lambda x: x.max(-1))


@jax.custom_jvp
def softmax(x: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """exp(x) / Σ exp(x) over the last axis, as `jax.nn.softmax`."""
    exponentials = jnp.exp(x - row_max(x)[..., None])
    return exponentials / exponentials.sum(-1, keepdims=True)


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    y = softmax(x)
    return y, y * (tangent - (y * tangent).sum(-1, keepdims=True))


def log_softmax(x: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """log softmax(x) over the last axis, as `jax.nn.log_softmax`."""
    shifted = x - row_max(x)[..., None]
    return shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))


def top_k(x: Float[Array, "B K V"], count: int) -> tuple[Float[Array, "B L"], Int[Array, "B L"]]:
    """(the largest numbers of each (K, V), their flat indices); of equal numbers, those of the lowest indices.

    An index of -inf may be that of any -inf. The numbers are searched in the `count` blocks with the largest maxima: a
    number in another block has at least `count` before it.
    """
    batch, _, columns = x.shape
    maxima = _maxima(x, _block_maxima, _block_maxima)
    blocks_per_row = maxima.shape[-1]
    maxima = maxima.reshape(batch, -1)
    if maxima.shape[1] <= count:
        values, indices = jax.lax.top_k(x.reshape(batch, -1), count)
        return values, indices
    blocks = jnp.sort(jax.lax.top_k(maxima, count)[1])  # in the order of their indices, which decides between equals
    row, first = blocks // blocks_per_row, blocks % blocks_per_row * BLOCK
    column = first[..., None] + jnp.arange(BLOCK, dtype=blocks.dtype)
    index = (row[..., None] * columns + jnp.minimum(column, columns - 1)).reshape(batch, -1)
    candidates = jnp.take_along_axis(x.reshape(batch, -1), index, axis=1)
    candidates = jnp.where(column.reshape(batch, -1) < columns, candidates, -jnp.inf)
    values, best = jax.lax.top_k(candidates, count)
    return values, jnp.take_along_axis(index, best, axis=1)


def _maxima(x: Array, of_integers: Callable[[Array], Array], of_floats: Callable[[Array], Array]) -> Array:
    """Maxima of x, by comparisons of integers for float32 on a CPU."""

    def on_cpu(x: Array) -> Array:
        return _floats(of_integers(_ordered_integers(x)))

    if x.dtype != jnp.float32:
        return of_floats(x)
    return jax.lax.platform_dependent(x, cpu=on_cpu, default=of_floats)


def _row_max(x: Array) -> Array:
    if x.shape[-1] > 2 * BLOCK:
        x = jax.lax.optimization_barrier(_block_maxima(x))  # otherwise XLA merges the two maxima again
    return x.max(-1)


def _block_maxima(x: Array) -> Array:
    """The maximum of every `BLOCK` numbers of a row, and of the rest."""
    width = x.shape[-1] // BLOCK * BLOCK
    maxima = x[..., :width].reshape(*x.shape[:-1], -1, BLOCK).max(-1)
    if width == x.shape[-1]:
        return maxima
    return jnp.concatenate([maxima, x[..., width:].max(-1, keepdims=True)], axis=-1)


def _ordered_integers(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers in the order of the float32 numbers: the bits, without the sign inverted in negative numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _floats(keys: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers of `_ordered_integers`, which is its own inverse."""
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)
