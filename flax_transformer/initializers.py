"""Initial values by name. Letters: I input features, O output features, N heads, V vocabulary, D d_model."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

init = jax.nn.initializers

# (kernel (I, O), bias (O,)) of a linear layer, given I, D, N for queries, keys and values, and its role: "query",
# "logits" or "hidden"
LINEAR_INITS: dict[str, Callable[[int, int, int, str], tuple[Initializer, Initializer]]] = {
    # U(±sqrt(6 / (I + O))). Source: Glorot and Bengio 2010, eq. 16.
    "xavier_uniform": lambda features, d_model, heads, role: (init.glorot_uniform(), init.zeros),
    # the same; bias U(±1/sqrt(I)), torch.nn.Linear's default, as in code that reinitializes weights only
    "xavier_uniform_torch_bias": lambda features, d_model, heads, role: (
        init.glorot_uniform(),
        _symmetric_uniform(features**-0.5),
    ),
    # the same, with U(±sqrt(6 / (I + O/N))), as if each head had its own matrix
    "xavier_uniform_per_head": lambda features, d_model, heads, role: (
        _glorot_per_head(heads),
        _symmetric_uniform(features**-0.5),
    ),
    # N(0, 1/I), truncated at two deviations. Source: LeCun et al. 1998, section 4.6; flax's default.
    "lecun_normal": lambda features, d_model, heads, role: (init.lecun_normal(), init.zeros),
    # N(0, 1/D)
    "normal_rsqrt_d_model": lambda features, d_model, heads, role: (init.normal(d_model**-0.5), init.zeros),
    # N(0, 1/I); for queries N(0, 1/(I·H)), for logits N(0, 1). Source: Mesh TensorFlow and T5, whose scores are not
    # divided by sqrt(H)
    "mesh_tensorflow": lambda features, d_model, heads, role: (_mesh_tensorflow(features, heads, role), init.zeros),
    # U(±1/sqrt(I)), kernel and bias: torch.nn.Linear's default
    "torch_default": lambda features, d_model, heads, role: (
        _symmetric_uniform(features**-0.5),
        _symmetric_uniform(features**-0.5),
    ),
}

# an embedding table (V, D), given D and the pad id, if any
EMBEDDING_INITS: dict[str, Callable[[int, int | None], Initializer]] = {
    "normal_rsqrt_d_model": lambda d_model, pad_id: init.normal(d_model**-0.5),
    "xavier_uniform": lambda d_model, pad_id: init.glorot_uniform(),
    "xavier_uniform_padding_idx": lambda d_model, pad_id: _zero_at(pad_id, init.glorot_uniform()),
    "torch_default": lambda d_model, pad_id: init.normal(1.0),  # torch.nn.Embedding's default
    "torch_padding_idx": lambda d_model, pad_id: _zero_at(pad_id, init.normal(1.0)),  # the same with padding_idx
}


def drawn(initializer: Initializer, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """The initial values of a parameter; the shape and dtype alone (`jax.ShapeDtypeStruct`) if `rngs` has no key."""
    key = rngs.params()
    return jax.ShapeDtypeStruct(shape, dtype) if key is None else initializer(key, shape, dtype)


def _zero_at(row: int | None, initializer: Initializer) -> Initializer:
    def draw(key: Any, shape: Any, dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        table = initializer(key, shape, dtype)
        return table if row is None else table.at[row].set(0)

    return draw


def _glorot_per_head(heads: int) -> Initializer:
    def draw(key: Any, shape: Any, dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        bound = math.sqrt(6 / (shape[0] + shape[1] / heads))
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


def _mesh_tensorflow(features: int, heads: int, role: str) -> Initializer:
    def draw(key: Any, shape: Any, dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        inputs = {"query": features * shape[1] // heads, "logits": 1}.get(role, features)
        return init.normal(inputs**-0.5)(key, shape, dtype)

    return draw


def _symmetric_uniform(bound: float) -> Initializer:
    return lambda key, shape, dtype=None, out_sharding=None: jax.random.uniform(key, shape, dtype, -bound, bound)
