"""Initial values by name. Letters: I input features, O output features, N heads, V vocabulary, D d_model."""

from collections.abc import Callable

from torch import Generator, Tensor
from torch.nn import init

_TRUNCATED_STD = 0.87962566103423978  # standard deviation of a standard normal truncated at ±2


def _normal_(weight: Tensor, std: float, generator: Generator | None) -> Tensor:
    # without values there is nothing to fill, and PyTorch would first import its compiler, which takes a second
    return weight if weight.is_meta else init.normal_(weight, std=std, generator=generator)


def _lecun_normal_(weight: Tensor, features: int, generator: Generator | None) -> None:
    std = features**-0.5 / _TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


def _zero_at_(weight: Tensor, row: int | None) -> None:
    if row is not None:
        init.zeros_(weight.detach()[row])


def _xavier_per_head_(weight: Tensor, heads: int, generator: Generator | None) -> None:
    for part in weight.detach().chunk(heads):
        init.xavier_uniform_(part, generator=generator)


def _mesh_tensorflow_(weight: Tensor, features: int, heads: int, role: str, generator: Generator | None) -> None:
    inputs = {"query": features * len(weight) // heads, "logits": 1}.get(role, features)
    _normal_(weight, inputs**-0.5, generator)


# fills weight (O, I), given I, D, N for queries, keys and values, its role ("query", "logits" or "hidden") and a
# generator
LINEAR_INITS: dict[str, Callable[[Tensor, int, int, int, str, Generator | None], object]] = {
    # U(±sqrt(6 / (I + O))). Source: Glorot and Bengio 2010, eq. 16.
    "xavier_uniform": lambda w, features, d_model, heads, role, g: init.xavier_uniform_(w, generator=g),
    # the same; bias U(±1/sqrt(I)), torch.nn.Linear's default, as in code that reinitializes weights only
    "xavier_uniform_torch_bias": lambda w, features, d_model, heads, role, g: init.xavier_uniform_(w, generator=g),
    # the same, with U(±sqrt(6 / (I + O/N))), as if each head had its own matrix
    "xavier_uniform_per_head": lambda w, features, d_model, heads, role, g: _xavier_per_head_(w, heads, g),
    # N(0, 1/I), truncated at two deviations. Source: LeCun et al. 1998, section 4.6; flax's default.
    "lecun_normal": lambda w, features, d_model, heads, role, g: _lecun_normal_(w, features, g),
    # N(0, 1/D)
    "normal_rsqrt_d_model": lambda w, features, d_model, heads, role, g: _normal_(w, d_model**-0.5, g),
    # N(0, 1/I); for queries N(0, 1/(I·H)), for logits N(0, 1). Source: Mesh TensorFlow and T5, whose scores are not
    # divided by sqrt(H)
    "mesh_tensorflow": lambda w, features, d_model, heads, role, g: _mesh_tensorflow_(w, features, heads, role, g),
    # U(±1/sqrt(I)), weight and bias: torch.nn.Linear's default
    "torch_default": lambda w, features, d_model, heads, role, g: init.uniform_(
        w, -(features**-0.5), features**-0.5, generator=g
    ),
}

# fills bias (O,), given I and a generator; other names give zeros
BIAS_INITS: dict[str, Callable[[Tensor, int, Generator | None], object]] = {
    name: lambda b, features, g: init.uniform_(b, -(features**-0.5), features**-0.5, generator=g)
    for name in ("torch_default", "xavier_uniform_torch_bias", "xavier_uniform_per_head")
}

# fills an embedding table (V, D), given D, the pad id, if any, and a generator
EMBEDDING_INITS: dict[str, Callable[[Tensor, int, int | None, Generator | None], object]] = {
    "normal_rsqrt_d_model": lambda w, d_model, pad_id, g: _normal_(w, d_model**-0.5, g),
    "xavier_uniform": lambda w, d_model, pad_id, g: init.xavier_uniform_(w, generator=g),
    "xavier_uniform_padding_idx": lambda w, d_model, pad_id, g: _zero_at_(init.xavier_uniform_(w, generator=g), pad_id),
    "torch_default": lambda w, d_model, pad_id, g: _normal_(w, 1.0, g),  # torch.nn.Embedding's default
    # the same with padding_idx
    "torch_padding_idx": lambda w, d_model, pad_id, g: _zero_at_(_normal_(w, 1.0, g), pad_id),
}
