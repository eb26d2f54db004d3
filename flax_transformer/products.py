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

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from .quantization import Quantized, quantized_product

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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, x: Array, weights: Array) -> Array:
    return _einsum(equation, x, weights)


def _product_forward(equation: str, x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return _einsum(equation, x, weights), (x, weights)


def _product_backward(equation: str, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weights = residuals
    of_x, of_weights, of_result = equation.replace("->", ",").split(",")

    def of_weights_on_cpu(x: Array, gradient: Array) -> Array:
        if x.dtype == jnp.bfloat16:
            return _einsum_on_cpu(f"{of_x},{of_result}->{of_weights}", x, gradient)
        rows = [array.reshape(-1, array.shape[-1]) for array in (x, gradient)]
        narrow_rows, wide_rows = sorted(rows, key=lambda array: array.shape[-1])
        result = _einsum_on_cpu("NM,MW->NW", jax.lax.optimization_barrier(narrow_rows.T), wide_rows)
        is_transposed = (narrow_rows is rows[0]) != (of_weights[0] == of_x[-1])
        return jax.lax.optimization_barrier(result).T if is_transposed else result

    return (
        _einsum(f"{of_result},{of_weights}->{of_x}", gradient, weights),
        jax.lax.platform_dependent(
            x,
            gradient,
            cpu=of_weights_on_cpu,
            default=partial(jnp.einsum, f"{of_x},{of_result}->{of_weights}"),
        ),
    )


_product.defvjp(_product_forward, _product_backward)


def _in_one_dtype(*arrays: Array) -> list[Array]:
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


@jax.custom_vjp
def _sum(x: Array, bias: Array) -> Array:
    return x + bias


def _sum_forward(x: Array, bias: Array) -> tuple[Array, None]:
    return x + bias, None


def _sum_backward(residuals: None, gradient: Array) -> tuple[Array, Array]:
    return gradient, _sum_rows(gradient)


_sum.defvjp(_sum_forward, _sum_backward)


@jax.custom_vjp
def _scale(x: Array, factors: Array) -> Array:
    return x * factors


def _scale_forward(x: Array, factors: Array) -> tuple[Array, tuple[Array, Array]]:
    return x * factors, (x, factors)


def _scale_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, factors = residuals
    return gradient * factors, _sum_rows(gradient * x)


_scale.defvjp(_scale_forward, _scale_backward)


def _sum_rows(x: Float[Array, "B L O"]) -> Float[Array, " O"]:
    """The sum over B and L; on a CPU a product with ones, because XLA has no fast code for it."""

    def on_cpu(rows: Array) -> Array:
        ones = jnp.ones((2, len(rows)), rows.dtype)  # YNNPACK computes no product with a single row
        with jax.named_scope(ROW_SUMS):
            return _einsum_on_cpu("RM,MO->RO", ones, rows)[0]

    rows = x.reshape(-1, x.shape[-1])
    return jax.lax.platform_dependent(rows, cpu=on_cpu, default=lambda rows: rows.sum(0))
