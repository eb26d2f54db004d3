"""Initial values by name. Letters: I input features, O output features, V vocabulary, D d_model."""

from collections.abc import Callable

from torch import Generator, Tensor
from torch.nn import init

_TRUNCATED_STD = 0.87962566103423978  # deviation of a standard normal cut at ±2


def _lecun_normal_(weight: Tensor, features: int, generator: Generator | None) -> None:
    std = features**-0.5 / _TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


# fills weight (O, I), given I, D and a generator
LINEAR_INITS: dict[str, Callable[[Tensor, int, int, Generator | None], object]] = {
    # U(±sqrt(6 / (I + O))). Source: Glorot and Bengio 2010, eq. 16.
    "xavier_uniform": lambda w, features, d_model, g: init.xavier_uniform_(w, generator=g),
    # N(0, 1/I), truncated at two deviations. Source: LeCun et al. 1998, section 4.6; flax's default.
    "lecun_normal": lambda w, features, d_model, g: _lecun_normal_(w, features, g),
    # N(0, 1/D)
    "normal_rsqrt_d_model": lambda w, features, d_model, g: init.normal_(w, std=d_model**-0.5, generator=g),
    # U(±1/sqrt(I)), weight and bias: torch.nn.Linear's default
    "torch_default": lambda w, features, d_model, g: init.uniform_(w, -(features**-0.5), features**-0.5, generator=g),
}

# fills bias (O,), given I and a generator; zeros where a name is not here
BIAS_INITS: dict[str, Callable[[Tensor, int, Generator | None], object]] = {
    "torch_default": lambda b, features, g: init.uniform_(b, -(features**-0.5), features**-0.5, generator=g),
}

# fills an embedding table (V, D), given D and a generator
EMBEDDING_INITS: dict[str, Callable[[Tensor, int, Generator | None], object]] = {
    "normal_rsqrt_d_model": lambda w, d_model, g: init.normal_(w, std=d_model**-0.5, generator=g),
    "xavier_uniform": lambda w, d_model, g: init.xavier_uniform_(w, generator=g),
    "torch_default": lambda w, d_model, g: init.normal_(w, generator=g),  # torch.nn.Embedding's default
}
