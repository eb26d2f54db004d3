"""Softmax and beam search's top-k, with maxima in a form that XLA computes fast on a CPU.

XLA compares floats one by one, so as to propagate NaNs, but vectorizes comparisons of integers. So float32 numbers are
compared as integers of the same order. Wide axes are divided into short blocks, whose comparisons XLA unrolls. GPUs,
TPUs and several devices use the forms of `jax.nn` and `jax.lax`.
"""

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Int

BLOCK = 16
_NEGATIVE_NANS = 0x7FFFFF  # number of float32 NaNs whose sign bit is set; 0/0 gives one on x86


@jax.jit
def row_max(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """The maximum over the last axis, -inf if it is empty, NaN if one is NaN, without a gradient."""
    x = jax.lax.stop_gradient(x)
    if not _can_be_divided(x):
        return x.max(-1, initial=-jnp.inf)
    return jax.lax.platform_dependent(x, cpu=_row_max_on_cpu, default=lambda x: x.max(-1))


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

    NaNs count as the largest. The index of a -inf may be any.
    """
    if not _can_be_divided(x) or x.shape[1] * -(-x.shape[2] // BLOCK) <= count:
        return _plain_top_k(x, count)
    return jax.lax.platform_dependent(
        x, cpu=lambda x: _top_k_of_blocks(x, count), default=lambda x: _plain_top_k(x, count)
    )


def _plain_top_k(x: Array, count: int) -> tuple[Array, Array]:
    values, indices = jax.lax.top_k(_with_positive_nans(x.reshape(len(x), -1)), count)
    return values, indices


def _top_k_of_blocks(x: Array, count: int) -> tuple[Array, Array]:
    """`top_k` in the blocks with the largest maxima: a number in another block is preceded by at least `count`."""
    batch, _, columns = x.shape
    maxima = _with_positive_nans(_floats(_block_maxima(_ordered_integers(x))))
    blocks_per_row = maxima.shape[-1]
    maxima = maxima.reshape(batch, -1)
    blocks = jnp.sort(jax.lax.top_k(maxima, count)[1])  # in the order of their indices, which decides between equals
    row, first = blocks // blocks_per_row, blocks % blocks_per_row * BLOCK
    column = first[..., None] + jnp.arange(BLOCK, dtype=blocks.dtype)
    index = (row[..., None] * columns + jnp.minimum(column, columns - 1)).reshape(batch, -1)
    candidates = jnp.take_along_axis(x.reshape(batch, -1), index, axis=1)
    candidates = jnp.where(column.reshape(batch, -1) < columns, candidates, -jnp.inf)
    values, best = jax.lax.top_k(_with_positive_nans(candidates), count)
    return values, jnp.take_along_axis(index, best, axis=1)


def _with_positive_nans(x: Array) -> Array:
    """The numbers with NaNs without a sign bit: `jax.lax.top_k` sorts the others below -inf."""
    return jnp.where(jnp.isnan(x), jnp.nan, x)


def _can_be_divided(x: Array) -> bool:
    """Whether the form for a CPU applies; with several devices, blocks of a sharded axis would be all-gathered."""
    if any(map(is_symbolic_dim, x.shape)):  # of an exported program
        return False
    return x.dtype == jnp.float32 and x.size > 0 and jax.device_count() == 1


def _row_max_on_cpu(x: Array) -> Array:
    keys = _ordered_integers(x)
    if keys.shape[-1] > 2 * BLOCK:
        keys = jax.lax.optimization_barrier(_block_maxima(keys))  # otherwise XLA merges the two maxima again
    return _floats(keys.max(-1))


def _block_maxima(keys: Int[Array, "*rows V"]) -> Int[Array, "*rows W"]:
    """The maximum of every `BLOCK` integers of a row, and of the rest."""
    width = keys.shape[-1] // BLOCK * BLOCK
    maxima = keys[..., :width].reshape(*keys.shape[:-1], -1, BLOCK).max(-1)
    if width == keys.shape[-1]:
        return maxima
    return jnp.concatenate([maxima, keys[..., width:].max(-1, keepdims=True)], axis=-1)


def _ordered_integers(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers in the order of the float32 numbers, NaNs last.

    They are the bits; in negative numbers all but the sign are inverted. NaNs with a sign bit would be the smallest:
    subtracting their number makes them the largest, because it wraps around.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) - _NEGATIVE_NANS


def _floats(keys: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers of `_ordered_integers`."""
    keys = keys + _NEGATIVE_NANS
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)
