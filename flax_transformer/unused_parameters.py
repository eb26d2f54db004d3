"""Detection of unused parameters: PyTorch gives them no gradient, JAX an ordinary gradient of zeros."""

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
    """The names of the parameters on which the logits do not depend for any input.

    In the jaxpr of the gradient, the gradients of these parameters depend on constants only.
    """
    config = config.replace(param_dtype="float32", compute_dtype="float32")
    model = Transformer.abstract(config)
    params, buffers = named_arrays(model, nnx.Param), named_arrays(model, Buffer)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def total(params: dict[str, jax.Array], buffers: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        logits = Transformer.from_arrays(config, {**buffers, **params})(tokens, tokens)
        return jnp.square(logits).sum()  # with a plain sum, the output bias' gradient would be constant too

    program = jax.make_jaxpr(jax.grad(total))(params, buffers, tokens).jaxpr
    variables = set(program.invars)
    for equation in program.eqns:
        if any(not isinstance(v, ConstantInJaxpr) and v in variables for v in equation.invars):
            variables |= set(equation.outvars)
    flags = (isinstance(v, ConstantInJaxpr) or v not in variables for v in program.outvars)
    return frozenset(name for name, constant in zip(sorted(params), flags, strict=True) if constant)
