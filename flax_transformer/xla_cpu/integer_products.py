"""Exact products of 8-bit integers, in a form for which XLA uses a CPU's instructions for them.

The instructions of AVX512-VNNI multiply unsigned by signed integers, and XLA uses them, through YNNPACK, only for such
a product. `jax.lax.dot_general` converts its operands to 32 bits, so the product is a primitive of its own.
"""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jaxtyping import Array, Int, Int8, UInt8

_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTIONS = {"avx512_vnni", "amx_int8"}  # for which jaxlib has kernels of unsigned and signed integers


def integer_product(
    equation: str, x: Int8[Array, "B L I"], matrix: Int8[Array, "_ _"], sums: Int[Array, " O"]
) -> Int[Array, "B L O"]:
    """The product of x and a matrix; `sums`: the sums of the matrix over its input axis.

    Σ x w = Σ (x + 128) w - 128 Σ w, where x + 128 is unsigned.
    """

    def unsigned_product(x: Array, matrix: Array, sums: Array) -> Array:
        shifted = jax.lax.bitcast_convert_type(x, jnp.uint8) ^ 128  # x + 128 in two's complement
        inputs = equation.split(",")[1].split("->")[0].index(equation[2])
        return _unsigned_product(shifted, matrix, inputs) - 128 * sums

    def signed_product(x: Array, matrix: Array, sums: Array) -> Array:
        return jnp.einsum(equation, x, matrix, preferred_element_type=jnp.int32)

    on_cpu = unsigned_product if has_unsigned_products() else signed_product
    return jax.lax.platform_dependent(x, matrix, sums, cpu=on_cpu, default=signed_product)


@lru_cache
def has_unsigned_products() -> bool:
    """Whether this CPU has instructions for unsigned by signed integers; False without /proc/cpuinfo."""
    if not _CPUINFO.is_file():
        return False
    flags = (line.split() for line in _CPUINFO.read_text().splitlines() if line.startswith("flags"))
    return not _INSTRUCTIONS.isdisjoint(next(flags, []))


@partial(jax.jit, static_argnames="inputs")
def _unsigned_product(x: UInt8[Array, "B L I"], matrix: Int8[Array, "_ _"], inputs: int) -> Int[Array, "B L O"]:
    return _UNSIGNED_PRODUCT.bind(x, matrix, inputs=inputs)


_UNSIGNED_PRODUCT = Primitive("unsigned_product")


@_UNSIGNED_PRODUCT.def_abstract_eval
def _shape(x: Any, matrix: Any, *, inputs: int) -> ShapedArray:
    return ShapedArray((*x.shape[:-1], matrix.shape[1 - inputs]), jnp.int32)


def _lower(context: Any, x: Any, matrix: Any, *, inputs: int) -> list[Any]:
    (result,) = context.avals_out
    result_type = ir.RankedTensorType.get(result.shape, ir.IntegerType.get_signless(32))
    numbers = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[],
        rhs_batching_dimensions=[],
        lhs_contracting_dimensions=[len(result.shape) - 1],
        rhs_contracting_dimensions=[inputs],
    )
    return [stablehlo.dot_general(result_type, x, matrix, numbers)]


mlir.register_lowering(_UNSIGNED_PRODUCT, _lower, platform="cpu")
