"""The trace of a model of either framework, or that of a recording."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .inputs import positional
from .recording import Recording
from .trace import Trace, named


def capture(model: Any, inputs: Any, cotangents: Mapping[str, np.ndarray] | None = None, random: bool = False) -> Trace:
    """The trace of any model that `diagnose` takes; with cotangents of its outputs, that of the backward pass too.

    `random`: whether the outputs may depend on random numbers, as in training mode.

    Raises:
        CaptureError: it cannot be traced.
    """
    if isinstance(model, Recording):
        return model.trace(cotangents, random)
    inputs = positional(model, inputs)
    trace = _capture(model, inputs, cotangents, random)
    trace.names = inputs.names
    return trace


def is_torch(model: Any) -> bool:
    """Whether it is a torch module, or a function of parameters that are tensors."""
    torch = sys.modules.get("torch")
    leaves = [leaf for _, leaf in named(model[1])] if isinstance(model, tuple) and len(model) == 2 else [model]
    return torch is not None and any(isinstance(leaf, (torch.nn.Module, torch.Tensor)) for leaf in leaves)


def _capture(model: Any, inputs: Sequence[Any], cotangents: Mapping[str, np.ndarray] | None, random: bool) -> Trace:
    if is_torch(model):
        from .torch_trace import capture_torch

        return capture_torch(model, inputs, cotangents, random)
    import jax

    from .jax_models import as_function, buffers_of, code_of_modules, with_buffers_fixed
    from .jax_trace import capture_jax

    torch = sys.modules.get("torch")
    arrays = jax.tree.map(
        lambda a: a.detach().numpy() if torch is not None and isinstance(a, torch.Tensor) else a, tuple(inputs)
    )
    function, parameters = as_function(model)
    function = function if cotangents is None else with_buffers_fixed(model, function)
    trace = capture_jax(function, parameters, arrays, cotangents, random)
    trace.code, trace.buffers = code_of_modules(model), buffers_of(model)
    return trace
