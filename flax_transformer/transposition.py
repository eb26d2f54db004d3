"""Functions that are linear in their last argument, with a transposed form of one's own.

JAX transposes a linear function operation by operation; where another form of the transposed function is faster,
`jax.custom_vjp` would give it at the cost of forward-mode derivatives. These functions keep both modes.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from inspect import signature
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


def total(changes: Iterable[tuple[Callable[[Array], Array], Any]], like: Array) -> Array:
    """The sum of linear functions of tangents, of which some may be symbolic zeros."""
    parts = [function(tangent) for function, tangent in changes if not isinstance(tangent, SymbolicZero)]
    return sum(parts[1:], start=parts[0]) if parts else jnp.zeros_like(like)


def _traced_once(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function, traced once per shapes and settings, not in each layer."""
    settings = [name for name, p in signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return jax.jit(function, static_argnames=settings, inline=True)


def linear(function: Callable[..., Array], transposed: Callable[..., Array] | None = None) -> Callable[..., Array]:
    """`function(*constants, x, **settings)`, linear in x, of which gradients keep the constants and nothing else.

    The gradient of x is `transposed(*constants, gradient, **settings)`, by default JAX's own.
    """
    primitive = Primitive(function.__name__.strip("_"))
    function = _traced_once(function)
    transposed = transposed and _traced_once(transposed)

    @cache
    def abstract(*arguments: Any, **settings: Any) -> Any:
        result = jax.eval_shape(partial(function, **settings), *arguments)
        return jax.core.ShapedArray(result.shape, result.dtype)

    def jvp(primals: Any, tangents: Any, **settings: Any) -> Any:
        *constants, x = primals
        *changes, tangent = tangents
        result = primitive.bind(*primals, **settings)
        parts = [] if isinstance(tangent, ad.Zero) else [primitive.bind(*constants, tangent, **settings)]
        if not all(isinstance(change, ad.Zero) for change in changes):
            changes = map(ad.instantiate_zeros, changes)
            parts.append(jax.jvp(lambda *c: function(*c, x, **settings), tuple(constants), tuple(changes))[1])
        return result, sum(parts[1:], start=parts[0])

    def transpose(gradient: Any, *arguments: Any, **settings: Any) -> list[Any]:
        *constants, x = arguments
        unchanged = [None] * len(constants)
        if isinstance(gradient, ad.Zero):
            return [*unchanged, ad.Zero(x.aval)]
        if transposed is not None:
            return [*unchanged, transposed(*constants, gradient, **settings)]
        return [*unchanged, *jax.linear_transpose(lambda x: function(*constants, x, **settings), x.aval)(gradient)]

    def batch(arguments: Any, axes: Any, **settings: Any) -> tuple[Any, int]:
        return jax.vmap(partial(function, **settings), axes)(*arguments), 0

    primitive.def_impl(lambda *arguments, **settings: jax.jit(partial(primitive.bind, **settings))(*arguments))
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    return primitive.bind
