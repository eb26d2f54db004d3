"""Weights and activations as 8-bit integers, which decode faster on a CPU with instructions for them.

Letters: B batch, L length, I inputs and O outputs of a product, V rows of a table, D its width.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from .lookup import rows
from .module import at_least_float32
from .xla_cpu.integer_products import integer_product

_LARGEST = 127  # -128 is not used, so that the range is symmetric


class Quantized(NamedTuple):
    """A matrix of integers with one scale per output of its product, and the sums of its values over the inputs."""

    values: Int8[Array, "_ _"]
    scales: Float[Array, " O"]
    sums: Int[Array, " O"]


def quantize_matrix(weights: Float[Array, "_ _"], inputs: int) -> Quantized:
    """values = round(weights / scales), where scales = max|weights| / 127 over the axis `inputs`."""
    weights = at_least_float32(weights)
    scales = jnp.abs(weights).max(inputs, keepdims=True) / _LARGEST
    values = _round(weights, scales)
    return Quantized(values, scales.squeeze(inputs), values.sum(inputs, dtype=jnp.int32))


def quantized_product(equation: str, x: Float[Array, "B L I"], weights: Quantized) -> Float[Array, "B L O"]:
    """The product of x and a quantized matrix. Each row of x is rounded to 8 bits too; the sums of products are exact.

    Source: Jacob et al. 2018, "Quantization and Training of Neural Networks", section 2.2, with symmetric ranges.
    """
    wide = at_least_float32(x)
    scales = jnp.abs(wide).max(-1, keepdims=True) / _LARGEST
    sums = integer_product(equation, _round(wide, scales), weights.values, weights.sums)
    return (sums * scales * weights.scales).astype(x.dtype)


def table_rows(table: Float[Array, "V D"] | Quantized, numbers: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    """The rows of a table with these numbers; NaN for a number that is too large."""
    if isinstance(table, Quantized):
        scales = jnp.take(table.scales, numbers, axis=0, mode="fill")
        return jnp.take(table.values, numbers, axis=0, mode="clip") * scales[..., None]
    return rows(table, numbers)


def _round(x: Float[Array, "..."], scales: Float[Array, "..."]) -> Int8[Array, "..."]:
    return jnp.round(x / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)


def quantize_arrays(arrays: dict[str, Any], tied_embedding: str | None) -> dict[str, Any]:
    """The arrays of a model by name, with the matrices of its products quantized."""

    def convert(name: str, array: Array) -> Any:
        inputs = 0 if name.endswith(".kernel") else 1 if name == tied_embedding else None
        return array if inputs is None else quantize_matrix(array, inputs)

    return {name: convert(name, array) for name, array in arrays.items()}
