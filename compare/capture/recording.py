"""A model that ran elsewhere, as its trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .arrays import narrowed
from .trace import CaptureError, Trace

SUFFIX = ".trace"
SEED = 0  # of the random cotangents
_NAMED = 3  # operations that a line names
_FACTOR = "cotangent."  # how the input begins that is one


@dataclass(frozen=True)
class Recording:
    """A model that ran elsewhere: its trace, that of its gradients where they were asked for, and its inputs."""

    forward: Trace
    backward: Trace | None = None
    inputs: Any = ()  # as they were given: by position or by name
    about: Mapping[str, str] = field(default_factory=dict)  # the model, and the versions that computed it
    file: str = ""

    def trace(self, cotangents: Mapping[str, np.ndarray] | None, random: bool) -> Trace:
        """The trace of the outputs; with cotangents of them, that of the gradients too.

        Raises:
            CaptureError: the gradients were not recorded, or with other cotangents, or the model is in training mode.
        """
        if not random:
            self.forward.check_deterministic("compare the dropout too, or record the model in evaluation mode")
        if cotangents is None:
            return self.forward
        backward, factors = self.check_gradients(), self.factors
        if any(not np.array_equal(factors[name], factor) for name, factor in cotangents.items()):
            raise CaptureError(
                f"{self.file}: its gradients are those of another sum of the outputs than the other side's; compare "
                "one of both models without a recording"
            )
        return backward

    def check_gradients(self) -> Trace:
        """The trace of the gradients. Raises: CaptureError if they were not recorded."""
        if self.backward is None:
            raise CaptureError(f"{self.file}: has no gradients; record it with --gradients")
        return self.backward

    @property
    def factors(self) -> dict[str, np.ndarray]:
        """The cotangents of the outputs in the backward pass."""
        if self.backward is None:
            return {}
        values = ((name.partition(_FACTOR), number) for name, number in self.backward.inputs.items())
        return {name: self.backward.values[number] for (start, prefix, name), number in values if prefix and not start}

    def gaps(self) -> list[str]:
        """The operations that cannot be computed on this machine, as a sentence."""
        names = {o.name for o in self.forward.operations if o.compute is None} - {*self.forward.random}
        names = sorted(name for name in names if not name.startswith("aten.empty"))
        if not names:
            return []
        listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        remedy = " without PyTorch" if all(name.startswith("aten.") for name in names) else ""
        return [f"{self.file}: other inputs, because {listed} cannot be computed here{remedy}"]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The parameters and buffers by name, in float32 where that holds them."""
        return {name: narrowed(self.forward.values.kept(number)) for name, number in self.forward.parameters.items()}

    def with_arrays(self, arrays: Mapping[str, np.ndarray]) -> "Recording":
        """The recording with other parameters: what depends on them is computed anew.

        Raises:
            CaptureError: an operation that depends on them cannot be computed on this machine.
        """
        traces = [None if t is None else _with_parameters(t, arrays, self.file) for t in (self.forward, self.backward)]
        assert traces[0] is not None
        return replace(self, forward=traces[0], backward=traces[1])


def _with_parameters(trace: Trace, arrays: Mapping[str, np.ndarray], file: str) -> Trace:
    new = {trace.parameters[name]: np.asarray(array, np.float64) for name, array in arrays.items()}
    reached = {number for number, array in new.items() if not np.array_equal(array, trace.values[number])}
    for operation in trace.operations:
        if not reached.isdisjoint(operation.inputs):
            if operation.compute is None:
                place = operation.line or operation.module
                raise CaptureError(
                    f"{file}: {place}: {operation.name} cannot be computed here, so the recording keeps its own "
                    "parameters; record the port with the reference's"
                )
            reached.update(operation.outputs)
    changed = trace.replay(new)
    return replace(trace, values=trace.values.with_changes(changed))
