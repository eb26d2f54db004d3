"""Inputs given by name, such as the batch of a data loader, as positional ones."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .trace import CaptureError


class Inputs(tuple[Any, ...]):
    """Positional inputs; `names`: path of an input in them -> the name under which it was given."""

    names: Mapping[str, str]

    def __new__(cls, values: Sequence[Any], names: Mapping[str, str]) -> "Inputs":
        """The values as a tuple, with their names."""
        inputs = super().__new__(cls, values)
        inputs.names = dict(names)
        return inputs


def positional(model: Any, inputs: Any) -> Inputs:
    """The inputs in the order in which the model takes them; a mapping is passed whole if no parameter has its names.

    Raises:
        CaptureError: they are neither a sequence nor a mapping, or can be passed by keyword only.
    """
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, (tuple, list)):
        return Inputs(inputs, {})
    if not isinstance(inputs, Mapping):
        raise CaptureError(f"inputs: {type(inputs).__name__}; pass a tuple of the model's inputs, or a dict by name")
    signature, has_parameters = _signature(model)
    try:
        bound = signature.bind(*([None] if has_parameters else []), **inputs)
    except TypeError:
        return Inputs((dict(inputs),), {f"0.{name}": str(name) for name in inputs})
    if bound.kwargs:
        name = next(iter(bound.kwargs))
        raise CaptureError(f"input {name}: the model takes it by keyword only; pass a model that takes it by position")
    values = bound.args[1:] if has_parameters else bound.args
    parameters = [*signature.parameters][len(bound.args) - len(values) :]
    return Inputs(values, {str(i): name for i, name in enumerate(parameters[: len(values)])})


def _signature(model: Any) -> tuple[inspect.Signature, bool]:
    """(the signature of the call, whether its first argument are the parameters)."""
    pair = isinstance(model, tuple) and len(model) == 2
    function: Any = model[0] if pair else model
    if pair and hasattr(function, "apply"):  # a Linen module
        return inspect.signature(function.__call__), False
    return inspect.signature(getattr(function, "forward", function)), pair
