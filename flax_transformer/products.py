"""Products with weights, in a form for which XLA uses a CPU's bfloat16 instructions.

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


def product(equation: str, x: Float[Array, "B L I"], weights: Float[Array, "_ _"] | Quantized) -> Float[Array, "B L O"]:
    """`jnp.einsum(equation, x, weights)` in the dtype of x.

    In bfloat16, sums are accumulated in float32 and rounded once.
    """
    if isinstance(weights, Quantized):
        return quantized_product(equation, x, weights)
    if x.dtype == jnp.bfloat16:
        return checkpoint_name(_narrow_product(equation, x, weights.astype(x.dtype)), NARROW_PRODUCT)
    return jnp.einsum(equation, x, weights.astype(x.dtype))


def add_bias(x: Float[Array, "B L O"], bias: Float[Array, " O"]) -> Float[Array, "B L O"]:
    """x + bias."""
    return _narrow_sum(x, bias) if x.dtype == jnp.bfloat16 else x + bias


def _einsum(equation: str, a: Array, b: Array) -> Array:
    def on_cpu(a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(a.dtype)

    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=partial(jnp.einsum, equation))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_product(equation: str, x: Array, weights: Array) -> Array:
    return _einsum(equation, x, weights)


def _product_forward(equation: str, x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return _einsum(equation, x, weights), (x, weights)


def _product_backward(equation: str, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weights = residuals
    of_x, of_weights, of_result = equation.replace("->", ",").split(",")
    return (
        _einsum(f"{of_result},{of_weights}->{of_x}", gradient, weights),
        _einsum(f"{of_x},{of_result}->{of_weights}", x, gradient),
    )


_narrow_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def _narrow_sum(x: Array, bias: Array) -> Array:
    return x + bias


def _sum_forward(x: Array, bias: Array) -> tuple[Array, None]:
    return x + bias, None


def _sum_backward(residuals: None, gradient: Array) -> tuple[Array, Array]:
    def on_cpu(rows: Array) -> Array:
        """A product with ones, because XLA's sums of bfloat16 rows took a quarter of a train step."""
        ones = jnp.ones((2, len(rows)), rows.dtype)  # YNNPACK computes no product with a single row
        return jnp.einsum("RM,MO->RO", ones, rows, preferred_element_type=jnp.float32)[0].astype(rows.dtype)

    rows = gradient.reshape(-1, gradient.shape[-1])
    return gradient, jax.lax.platform_dependent(rows, cpu=on_cpu, default=lambda rows: rows.sum(0))


_narrow_sum.defvjp(_sum_forward, _sum_backward)
