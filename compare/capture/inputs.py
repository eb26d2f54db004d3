"""Inputs given by name, such as the batch of a data loader, as positional ones."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .recording import Recording
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
    """The inputs in the order in which the model takes them; a mapping of other names is passed whole.

    Raises:
        CaptureError: they are neither a sequence nor a mapping, or the model has no such parameters by position.
    """
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(model, Recording):  # it has its own
        return Inputs((), {})
    if isinstance(inputs, (tuple, list)):
        return Inputs(inputs, {})
    if not isinstance(inputs, Mapping):
        raise CaptureError(f"inputs: {type(inputs).__name__}; pass a tuple of the model's inputs, or a dict by name")
    signature, has_parameters = _signature(model)
    parameters = [*signature.parameters.values()][has_parameters:]
    if not any(parameter.name in inputs for parameter in parameters):
        return Inputs((dict(inputs),), {f"0.{name}": str(name) for name in inputs})
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [parameter.name for parameter in by_position]
    for name in inputs:
        if name not in names:
            what = "takes it by keyword only" if name in signature.parameters else "has no such parameter"
            raise CaptureError(f"input {name}: the model {what}; it takes {', '.join(names)} by position")
    given = by_position[: max(names.index(name) for name in inputs) + 1]
    missing = [p.name for p in given if p.name not in inputs and p.default is p.empty]
    if missing:
        raise CaptureError(f"input {missing[0]}: the model needs it; the inputs are {', '.join(map(str, inputs))}")
    values = [inputs.get(p.name, p.default) for p in given]
    return Inputs(values, {str(i): parameter.name for i, parameter in enumerate(given)})


def _signature(model: Any) -> tuple[inspect.Signature, bool]:
    """(the signature of the call, whether its first argument is the parameters)."""
    pair = isinstance(model, tuple) and len(model) == 2
    function: Any = model[0] if pair else model
    if pair and hasattr(function, "apply"):  # a Linen module
        return inspect.signature(function.__call__), False
    return inspect.signature(getattr(function, "forward", function)), pair
