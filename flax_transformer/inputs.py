"""Checks of the model's inputs: a clear error instead of a clamped index or a broadcast shape."""

from typing import Any

import jax
import jax.core
import jax.errors
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from ..backend.errors import ConfigError
from ..configs.schema import TransformerConfig
from .dropout import DropoutKey


def float64_is_on() -> bool:
    """Whether JAX computes in float64; otherwise it silently converts float64 to float32."""
    return jnp.result_type(float) == jnp.float64


def check_dtypes(config: TransformerConfig) -> None:
    """Raises: ConfigError if the config selects float64 and JAX would silently compute in float32."""
    if "float64" in (config.param_dtype, config.compute_dtype) and not float64_is_on():
        raise ConfigError(
            "the config selects float64, which is disabled in JAX: call jax.config.update('jax_enable_x64', True) "
            "first, use `with jax.enable_x64(True):`, or set JAX_ENABLE_X64=1"
        )


def check_inputs(
    side: str,
    tokens: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray | None,
    vocab_size: int,
    max_length: int,
    dropout_key: DropoutKey | None,
) -> None:
    """Check tokens, mask and dropout rows of one side, "src" or "tgt", against the model and each other.

    Raises:
        ValueError: names the argument, what it is, and what it must be. Ids cannot be checked inside `jax.jit`.
    """
    name = f"{side}_tokens"
    for argument, value in ((name, tokens), (f"{side}_mask", mask)):
        present = value is not None or argument == name
        if present and not isinstance(value, jax.Array | np.ndarray):
            raise ValueError(f"{argument}: must be a JAX or numpy array, not a {type(value).__name__}")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{name}: must be integers of shape (batch, length), not {tokens.dtype}{list(tokens.shape)}")
    if is_symbolic_dim(length := tokens.shape[1]):
        _check_bound(name, length, max_length)
    elif not 1 <= length <= max_length:
        raise ValueError(f"{name}: length {length} is not between 1 and the config's max_length={max_length}")
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != bool):
        raise ValueError(
            f"{side}_mask: must be booleans of shape {list(tokens.shape)}, as {name}, "
            f"not {mask.dtype}{list(mask.shape)}; True = attend"
        )
    if dropout_key is not None and dropout_key.rows.shape != tokens.shape[:1]:
        raise ValueError(
            f"dropout_key.rows: must be {tokens.shape[0]} row numbers, one per sentence, "
            f"not of shape {list(dropout_key.rows.shape)}"
        )
    if not isinstance(tokens, jax.core.Tracer):
        _check_ids(name, np.asarray(tokens), vocab_size)


def _check_bound(name: str, length: Any, max_length: int) -> None:
    try:
        fits = length <= max_length
    except jax.errors.InconclusiveDimensionOperation:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: length {length} may exceed the config's max_length={max_length}; bound it, as in "
            f"jax.export.symbolic_shape('b, {length}', constraints=['{length} <= {max_length}'])"
        )


def check_memory(tgt_tokens: jax.Array, memory: jax.Array, src_mask: jax.Array) -> None:
    """Raises: ValueError if target, encoder output and source mask have different batch sizes or source lengths."""
    if not tgt_tokens.shape[0] == memory.shape[0] == src_mask.shape[0]:
        raise ValueError(
            f"src_tokens and tgt_tokens: must have the same batch size, "
            f"not {memory.shape[0]} and {tgt_tokens.shape[0]} sentences; src_mask has {src_mask.shape[0]}"
        )
    if src_mask.dtype != bool:
        raise ValueError(f"src_mask: must be booleans, not {src_mask.dtype}; True = attend")
    if memory.shape[1] != src_mask.shape[1]:
        raise ValueError(f"src_mask: must have the encoder output's length {memory.shape[1]}, not {src_mask.shape[1]}")


def _check_ids(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    outside = np.argwhere((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        row, column = (int(i) for i in outside[0])
        raise ValueError(
            f"{name}[{row}, {column}] is {tokens[row, column]}: {len(outside)} ids are outside the vocabulary, "
            f"0 to {vocab_size - 1}"
        )
