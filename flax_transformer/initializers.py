"""Initial values by name. Letters: I input features, O output features, V vocabulary, D d_model."""

from collections.abc import Callable

import jax
from jax.nn.initializers import Initializer

init = jax.nn.initializers

# (kernel (I, O), bias (O,)) of a linear layer, given I and D
LINEAR_INITS: dict[str, Callable[[int, int], tuple[Initializer, Initializer]]] = {
    # U(±sqrt(6 / (I + O))). Source: Glorot and Bengio 2010, eq. 16.
    "xavier_uniform": lambda features, d_model: (init.glorot_uniform(), init.zeros),
    # N(0, 1/I), truncated at two deviations. Source: LeCun et al. 1998, section 4.6; flax's default.
    "lecun_normal": lambda features, d_model: (init.lecun_normal(), init.zeros),
    # N(0, 1/D)
    "normal_rsqrt_d_model": lambda features, d_model: (init.normal(d_model**-0.5), init.zeros),
    # U(±1/sqrt(I)), kernel and bias: torch.nn.Linear's default
    "torch_default": lambda features, d_model: (_symmetric_uniform(features**-0.5), _symmetric_uniform(features**-0.5)),
}

# an embedding table (V, D), given D
EMBEDDING_INITS: dict[str, Callable[[int], Initializer]] = {
    "normal_rsqrt_d_model": lambda d_model: init.normal(d_model**-0.5),
    "xavier_uniform": lambda d_model: init.glorot_uniform(),
    "torch_default": lambda d_model: init.normal(1.0),  # torch.nn.Embedding's default
}


def _symmetric_uniform(bound: float) -> Initializer:
    return lambda key, shape, dtype=None, out_sharding=None: jax.random.uniform(key, shape, dtype, -bound, bound)
