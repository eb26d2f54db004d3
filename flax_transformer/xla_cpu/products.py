"""Products with weights, in forms that XLA computes fast on a CPU, through YNNPACK.

The gradient of the weights is the product of the inputs and the gradient of the outputs, summed over their rows. In
float32 and float64, XLA has fast code for it only if one of the two is transposed into an array of its own, which a
barrier keeps. That is the narrower one; where the weights need it, the result is transposed back, behind another
barrier. In bfloat16, the transposition would take longer than it saves.

XLA converts the operands of a product of bfloat16 arrays to float32 if its result is bfloat16. If the result is
float32, YNNPACK computes it with the instructions of the CPU, such as AMX. So the result is rounded here, and in the
backward pass, where JAX would multiply by a gradient in float32. On a GPU and a TPU, results stay bfloat16.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..quantization import Quantized, quantized_product
from ..transposition import linear, total

NARROW_PRODUCT = "narrow_product"  # name of a product in bfloat16, for rematerialization
ROW_SUMS = "row_sums"  # scope of the products with ones, in a program


def product(equation: str, x: Float[Array, "B L I"], weights: Float[Array, "_ _"] | Quantized) -> Float[Array, "B L O"]:
    """`jnp.einsum(equation, x, weights)` in the dtype of x.

    In bfloat16, sums are accumulated in float32 and rounded once.
    """
    if isinstance(weights, Quantized):
        return quantized_product(equation, x, weights)
    y: Array = _product(equation, x, weights.astype(x.dtype))
    return checkpoint_name(y, NARROW_PRODUCT) if x.dtype == jnp.bfloat16 else y


def add_bias(x: Float[Array, "B L O"], bias: Float[Array, " O"]) -> Float[Array, "B L O"]:
    """x + bias."""
    return _sum(*_in_one_dtype(x, bias))


def scale(x: Float[Array, "B L D"], factors: Float[Array, " D"]) -> Float[Array, "B L D"]:
    """x · factors."""
    return _scale(*_in_one_dtype(x, factors))


def _einsum(equation: str, a: Array, b: Array) -> Array:
    if a.dtype != jnp.bfloat16:
        return jnp.einsum(equation, a, b)
    return jax.lax.platform_dependent(
        a, b, cpu=partial(_einsum_on_cpu, equation), default=partial(jnp.einsum, equation)
    )


def _einsum_on_cpu(equation: str, a: Array, b: Array) -> Array:
    sums = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=sums).astype(a.dtype)


def _of_inputs(weights: Array, x: Array, *, equation: str) -> Array:
    return _einsum(equation, x, weights)


def _gradient_of_inputs(weights: Array, gradient: Array, *, equation: str) -> Array:
    of_x, of_weights, of_result = _letters(equation)
    return _einsum(f"{of_result},{of_weights}->{of_x}", gradient, weights)


def _of_weights(x: Array, weights: Array, *, equation: str) -> Array:
    return _einsum(equation, x, weights)


def _gradient_of_weights(x: Array, gradient: Array, *, equation: str) -> Array:
    of_x, of_weights, of_result = _letters(equation)

    def on_cpu(x: Array, gradient: Array) -> Array:
        if x.dtype == jnp.bfloat16:
            return _einsum_on_cpu(f"{of_x},{of_result}->{of_weights}", x, gradient)
        rows = [array.reshape(-1, array.shape[-1]) for array in (x, gradient)]
        narrow_rows, wide_rows = sorted(rows, key=lambda array: array.shape[-1])
        result = _einsum_on_cpu("NM,MW->NW", jax.lax.optimization_barrier(narrow_rows.T), wide_rows)
        is_transposed = (narrow_rows is rows[0]) != (of_weights[0] == of_x[-1])
        return jax.lax.optimization_barrier(result).T if is_transposed else result

    default = partial(jnp.einsum, f"{of_x},{of_result}->{of_weights}")
    return jax.lax.platform_dependent(x, gradient, cpu=on_cpu, default=default)


def _letters(equation: str) -> list[str]:
    """The axes of the inputs, of the weights and of the result."""
    return equation.replace("->", ",").split(",")


_linear_in_inputs = linear(_of_inputs, _gradient_of_inputs)
_linear_in_weights = linear(_of_weights, _gradient_of_weights)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(equation: str, x: Array, weights: Array) -> Array:
    return _einsum(equation, x, weights)


@partial(_product.defjvp, symbolic_zeros=True)
def _(equation: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, weights = primals
    result = _einsum(equation, x, weights)  # not `_product`, in which rematerialization sees no product
    functions = [
        partial(_linear_in_inputs, weights, equation=equation),
        partial(_linear_in_weights, x, equation=equation),
    ]
    return result, total(zip(functions, tangents, strict=True), result)


def _in_one_dtype(*arrays: Array) -> list[Array]:
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


def _repeated(x: Array, row: Array) -> Array:
    return jnp.broadcast_to(row, x.shape)


def _gradient_of_row(x: Array, gradient: Array) -> Array:
    return _sum_rows(gradient)


def _scaled(x: Array, factors: Array) -> Array:
    return x * factors


def _gradient_of_factors(x: Array, gradient: Array) -> Array:
    return _sum_rows(gradient * x)


_linear_in_row = linear(_repeated, _gradient_of_row)
_linear_in_factors = linear(_scaled, _gradient_of_factors)


@jax.custom_jvp
def _sum(x: Array, bias: Array) -> Array:
    return x + bias


@partial(_sum.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, bias = primals
    result = x + bias
    return result, total(zip((lambda x: x, partial(_linear_in_row, x)), tangents, strict=True), result)


@jax.custom_jvp
def _scale(x: Array, factors: Array) -> Array:
    return x * factors


@partial(_scale.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, factors = primals
    result = x * factors
    return result, total(zip((lambda x: x * factors, partial(_linear_in_factors, x)), tangents, strict=True), result)


def _sum_rows(x: Float[Array, "B L O"]) -> Float[Array, " O"]:
    """The sum over B and L; on a CPU a product with ones, because XLA has no fast code for it."""

    def on_cpu(rows: Array) -> Array:
        ones = jnp.ones((2, len(rows)), rows.dtype)  # YNNPACK computes no product with a single row
        with jax.named_scope(ROW_SUMS):
            return _einsum_on_cpu("RM,MO->RO", ones, rows)[0]

    rows = x.reshape(-1, x.shape[-1])
    return jax.lax.platform_dependent(rows, cpu=on_cpu, default=lambda rows: rows.sum(0))
