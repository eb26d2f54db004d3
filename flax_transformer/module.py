"""What every module here shares: its variables by name, and its activations by path.

A name is the path from the model's root, joined by dots: `encoder.layers.0.self_attention.q_proj.kernel`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Buffer(nnx.Variable):
    """A fixed array: saved and ported with the model, never trained."""


def record(module: nnx.Module, name: str, value: jax.Array) -> None:
    """Offers an activation to `activations`; does nothing outside of it."""
    if hasattr(module, "__captures__"):  # set by nnx.capture; a sow outside of it would add state
        module.sow(nnx.Intermediate, name, value)


def activations(model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Calls the model: (its result, every recorded activation by path). Works inside `jax.jit`."""
    try:
        result, captured = nnx.capture(model, nnx.Intermediate)(*args, **kwargs)
    finally:
        for _, module in nnx.iter_modules(model):
            if hasattr(module, "__captures__"):  # nnx leaves it where the call raises
                delattr(module, "__captures__")
    return result, {join_path(path): value.get_value()[0] for path, value in nnx.to_flat_state(captured)}


def named_arrays(tree: nnx.Module | nnx.State, kind: Any = (nnx.Param, Buffer)) -> dict[str, Any]:
    """Parameters and buffers of a model or a state by name, sorted; `kind` chooses, as `nnx.Param`.

    An abstract model, as `nnx.eval_shape` makes it, gives their shapes and dtypes.
    """
    state = nnx.state(tree, kind) if isinstance(tree, nnx.Module) else nnx.filter_state(tree, kind)
    flat = {join_path(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return dict(sorted(flat.items()))


def at_least_float32(x: jax.Array) -> jax.Array:
    """x in float32, or as it is where it is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def join_path(path: tuple[Any, ...]) -> str:
    """A name from a path."""
    return ".".join(map(str, path))
