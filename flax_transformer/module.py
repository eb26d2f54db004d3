"""Helpers of all modules: variables by name, activations by path.

A name is the path from the model's root, joined by dots: `encoder.layers.0.self_attention.q_proj.kernel`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather


class Buffer(nnx.Variable):
    """A fixed array: saved and ported with the model, never trained."""


def record(module: nnx.Module, name: str, value: jax.Array) -> None:
    """Record an activation for `activations`; a no-op outside of it."""
    if hasattr(module, "__captures__"):  # set by nnx.capture; a sow outside of it would add state
        module.sow(nnx.Intermediate, name, value)


def activations(model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Call the model; return (its result, all recorded activations by path). Works inside `jax.jit`."""
    try:
        result, captures = nnx.capture(model, nnx.Intermediate)(*args, **kwargs)
    finally:
        for _, module in nnx.iter_modules(model):
            if hasattr(module, "__captures__"):  # nnx does not remove it if the call raises
                delattr(module, "__captures__")
    return result, {join_path(path): value.get_value()[0] for path, value in nnx.to_flat_state(captures)}


def named_arrays(tree: nnx.Module | nnx.State, kind: Any = (nnx.Param, Buffer)) -> dict[str, Any]:
    """Parameters and buffers of a model or a state by name, sorted; `kind` filters them, such as `nnx.Param`.

    For an abstract model of `nnx.eval_shape`, their shapes and dtypes.
    """
    state = nnx.state(tree, kind) if isinstance(tree, nnx.Module) else nnx.filter_state(tree, kind)
    flat = {join_path(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return dict(sorted(flat.items()))


def at_least_float32(x: jax.Array) -> jax.Array:
    """x, converted to float32 unless its dtype is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """The whole array in NumPy, in every process; a sharded one is gathered."""
    spread = isinstance(array, jax.Array) and not array.is_fully_addressable
    return np.asarray(process_allgather(array, tiled=True) if spread else array)


def join_path(path: tuple[Any, ...]) -> str:
    """The name of a path."""
    return ".".join(map(str, path))
