"""Which parameters the loss does not reach: PyTorch gives them no gradient, JAX zeros that look like any others."""

from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal as ConstantInJaxpr

from ..configs.schema import TransformerConfig
from .model import Transformer
from .module import Buffer, named_arrays


@lru_cache(maxsize=64)
def without_gradient(config: TransformerConfig) -> frozenset[str]:
    """Names of the parameters on which the logits do not depend, whatever the input.

    Read from the computation itself: in the program of the gradient, theirs is made from constants alone.
    """
    config = config.replace(param_dtype="float32", compute_dtype="float32")
    model = Transformer.abstract(config)
    params, buffers = named_arrays(model, nnx.Param), named_arrays(model, Buffer)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def total(params: dict[str, jax.Array], buffers: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        logits = Transformer.from_arrays(config, {**buffers, **params})(tokens, tokens)
        return jnp.square(logits).sum()  # of a plain sum, the output bias' gradient would be a constant too

    program = jax.make_jaxpr(jax.grad(total))(params, buffers, tokens).jaxpr
    reached = set(program.invars)
    for equation in program.eqns:
        if any(not isinstance(v, ConstantInJaxpr) and v in reached for v in equation.invars):
            reached |= set(equation.outvars)
    constant = (isinstance(v, ConstantInJaxpr) or v not in reached for v in program.outvars)
    return frozenset(name for name, unreached in zip(sorted(params), constant, strict=True) if unreached)
