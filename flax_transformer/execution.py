"""Execution of a stack of layers: rematerialization, and one loop over stacked arrays instead of a copy per layer.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", for rematerialization.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ..configs.execution import PLAIN, ExecutionConfig
from .dropout import Site
from .xla_cpu.products import NARROW_PRODUCT

# (layer, its input) -> its output
LayerCall = Callable[[Any, Float[Array, "B L D"]], Float[Array, "B L D"]]


class Executed(nnx.Module):
    """A module that the settings of `ExecutionConfig` concern."""

    execution: ExecutionConfig = PLAIN  # a Transformer sets it

    @property
    def current_execution(self) -> ExecutionConfig:
        """The settings of this call: the default ones while `activations` records, because it needs every layer."""
        return PLAIN if hasattr(self, "__captures__") else self.execution


def run_layers(
    layers: Sequence[nnx.Module], call: LayerCall, x: Float[Array, "B L D"], execution: ExecutionConfig
) -> Float[Array, "B L D"]:
    """The output of the last layer; each layer's output is the input of the next."""
    if execution.scan_layers and len(layers) > 1:
        return _run_in_scan(layers, call, x, REMATS[execution.remat])
    if execution.remat != "none":
        return _run_in_turn(layers, call, x, REMATS[execution.remat])
    for layer in layers:
        x = call(layer, x)
    return x


def _run_in_turn(layers: Sequence[nnx.Module], call: LayerCall, x: Array, remat: Callable[..., Any]) -> Array:
    def run(graphdef: Any, arrays: Any, x: Array) -> Array:
        return call(nnx.merge(graphdef, arrays), x)

    for layer in layers:
        graphdef, arrays = nnx.split(layer)
        x = remat(partial(run, graphdef), prevent_cse=True)(arrays, x)
    return x


def _run_in_scan(layers: Sequence[nnx.Module], call: LayerCall, x: Array, remat: Callable[..., Any]) -> Array:
    """The layers have one structure and differ in their arrays and in the numbers of their dropout sites."""
    graphdefs, arrays = zip(*(nnx.split(layer) for layer in layers), strict=True)
    stacked = jax.tree.map(lambda *same: jnp.stack(same), *arrays)
    numbers = np.array([[site.site for site in _sites(layer)] for layer in layers], np.uint32)

    def run(x: Array, part: tuple[Any, Array]) -> tuple[Array, None]:
        arrays, numbers = part
        layer = nnx.merge(graphdefs[0], arrays)
        for site, number in zip(_sites(layer), numbers, strict=True):
            site.site = number
        return call(layer, x), None

    # In a scan, XLA cannot merge the recomputation with the forward pass.
    return jax.lax.scan(remat(run, prevent_cse=False), x, (stacked, jnp.asarray(numbers)))[0]


def _sites(layer: nnx.Module) -> list[Site]:
    """The dropout sites of a layer, in the same order for every layer."""
    return [module for _, module in nnx.iter_modules(layer) if isinstance(module, Site)]


def _products_saveable(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Whether to save a result for the backward pass: products with weights, in bfloat16 only after rounding."""
    if primitive is jax.lax.dot_general_p and operands[0].dtype == jnp.bfloat16:
        return False  # the sums before rounding
    named = jax.checkpoint_policies.save_only_these_names(NARROW_PRODUCT)(primitive, *operands, **params)
    return named or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)


REMATS: dict[str, Callable[..., Any]] = {
    "none": lambda run, prevent_cse: run,
    "layers": jax.checkpoint,
    "dots": partial(jax.checkpoint, policy=_products_saveable),
}
