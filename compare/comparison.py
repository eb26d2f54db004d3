"""The comparison of two models: outputs, gradients and rounding, with what the inputs did not reach."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ..backend.notebook import result_html
from ..backend.self_test import check_compiler
from .capture.inputs import positional
from .capture.models import capture
from .capture.parameters import arrays_of, with_arrays
from .capture.recording import Recording
from .capture.trace import CaptureError, Trace, dotted
from .coverage import coverage_gaps
from .matching.matching import with_common_outputs
from .matching.states import updated
from .repair.defect import Defect
from .repair.diagnosis import Diagnosis, diagnose_traces, trace_weights
from .rounding import Rounding, compare_rounding
from .training.dropout import capture_in_training
from .training.gradients import diagnose_gradients
from .training.updates import UpdateDifference, compare_updates
from .weight_map.probing import completed

Convert = Callable[[dict[str, np.ndarray]], Any]  # the reference's parameters by name -> the candidate's


@dataclass(frozen=True)
class Comparison:
    """What was found, and what it rests on."""

    forward: Diagnosis
    backward: Diagnosis | None = None  # None: not compared
    update: tuple[UpdateDifference, ...] | None = None  # None: not compared
    rounding: tuple[Rounding, ...] = ()
    coverage_gaps: tuple[str, ...] = ()
    traces: tuple[Trace, ...] = field(default=(), repr=False)  # of the reference and of the candidate
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """That of the first part that differs: outputs, gradients, optimizers, rounding."""
        if not self.forward.ok:
            return self.forward.verdict
        if self.backward is not None and not self.backward.ok:
            return f"gradients {self.backward.verdict}"
        if self.update:
            return "optimizers different"
        if any(not entry.failure and not entry.ok for entry in self.rounding):
            return "different in rounding"
        return self.forward.verdict

    @property
    def ok(self) -> bool:
        """Whether both are the same function on these inputs, in all that was compared."""
        return self.verdict.startswith("equal")

    def _repr_html_(self) -> str:
        errors: dict[tuple[str, ...], float] = {}  # the same difference often occurs in several layers
        for part, diagnosis in (("outputs", self.forward), ("gradients", self.backward)):
            for d in diagnosis.defects if diagnosis is not None else ():
                lines = ", ".join(dict.fromkeys(o.line or o.module for o in d.reference if o.line or o.module))
                row = (part, ", ".join(d.lines), d.note or str(d.repair or "none found"), lines)
                errors[row] = max(d.error, errors.get(row, 0.0))
        columns = ("", "candidate", "repair", "reference", "error")
        return result_html(self.verdict, self.ok, columns, [(*row, f"{error:.1g}") for row, error in errors.items()])

    def __str__(self) -> str:
        """The findings, one per line."""
        lines = [f"outputs: {self.forward}"]
        lines += [f"gradients: {self.backward}"] if self.backward is not None else []
        lines += [f"optimizer: {difference}" for difference in self.update or ()]
        lines += [str(entry) for entry in self.rounding]
        lines += [f"not tested: {sentence}" for sentence in self.coverage_gaps]
        return "\n".join(lines)


@np.errstate(all="ignore")  # infinities and NaN are values here
def compare(
    reference: Any,
    candidate: Any,
    inputs: Sequence[Any],
    candidate_inputs: Sequence[Any] | None = None,
    *,
    convert: Convert | None = None,
    gradients: bool = False,
    optimizers: tuple[Any, Any] | None = None,
    dropout: bool = False,
    rounding: bool = True,
) -> Comparison:
    """Compare two models as `diagnose` does, then their gradients if asked for, and their rounding.

    `dropout`: the models are in training mode, and the candidate gets the reference's dropout masks and other random
    numbers; rounding is then not measured.

    `convert`: returns the candidate's parameters, named as in its trace, from the reference's, which are arrays by
    name; without it, the candidate's own are used. `optimizers`: for each model an optax transformation, or a function
    of (name, parameter) pairs that returns a torch optimizer. All but the outputs is compared if the outputs are equal.

    Raises:
        CaptureError: a model cannot be traced, or the converter fails.
        TypeError: an optimizer is neither.
    """
    check_compiler()
    others = inputs if candidate_inputs is None else candidate_inputs
    both_inputs = positional(reference, inputs), positional(candidate, others)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    gaps: list[str] = []
    if convert is not None:
        converted = _converted(convert, arrays_of(reference))
        omitted = [name for name in arrays_of(candidate) if name not in converted]
        gaps = [f"{name}: not returned by the converter; it keeps its own values" for name in omitted]
        candidate = with_arrays(candidate, converted)
    traces, masks = _traces((reference, candidate), both_inputs, dropout)
    traces, further = with_common_outputs(traces)
    gaps += further
    weights = trace_weights(*traces)
    if convert is not None:
        weights = completed(weights, convert, arrays_of(reference), arrays_of(candidate))
    seconds["tracing"] = time.perf_counter() - start
    start = time.perf_counter()
    forward = diagnose_traces(*traces, weights)
    if masks:
        others = [defect for defect in forward.defects if defect.repair is not None]  # the rest may follow from masks
        verified = forward.ok and all(mask.repair is not None for mask in masks)  # with the reference's masks
        forward = replace(forward, verdict="different", defects=(*masks, *others), verified=verified)
    seconds["outputs"] = time.perf_counter() - start
    requested = {"gradients": gradients, "optimizers": optimizers is not None}
    gaps += [f"{part}, because the outputs differ" for part in requested if requested[part] and not forward.ok]
    backward: Diagnosis | None = None
    update: tuple[UpdateDifference, ...] | None = None
    errors: list[Rounding] = []
    if forward.ok:
        start = time.perf_counter()
        if gradients:
            backward = _gradients((reference, candidate), both_inputs, traces, forward, dropout)
            seconds["gradients"] = time.perf_counter() - start
        if optimizers is not None:
            update, failure = _updates(optimizers, traces[0])
            gaps += failure
        start = time.perf_counter()
        if rounding and any(isinstance(model, Recording) for model in (reference, candidate)):
            gaps.append("rounding in float32 and bfloat16, because a recording has float64 only")
        elif rounding and any(trace.derived and updated(trace) for trace in traces):  # optimizers divide small numbers
            gaps.append("rounding in float32 and bfloat16, because the outputs are updated parameters")
        elif rounding and not dropout:
            errors = compare_rounding((reference, candidate), both_inputs, traces, weights)
            seconds["rounding"] = time.perf_counter() - start
    gaps += coverage_gaps(*traces, weights)
    gaps += [line for side in (reference, candidate) if isinstance(side, Recording) for line in side.gaps()]
    return Comparison(forward, backward, update, tuple(errors), tuple(gaps), traces, seconds)


def _updates(optimizers: tuple[Any, Any], trace: Trace) -> tuple[tuple[UpdateDifference, ...] | None, list[str]]:
    """The differences of two optimizers; None, and a sentence, if one cannot be run."""
    try:
        return tuple(compare_updates(optimizers[0], optimizers[1], *_trained(trace))), []
    except Exception as error:  # whatever an optimizer raises, such as one that needs a closure
        if isinstance(error, TypeError) and "is not an optimizer" in str(error):
            raise
        return None, [f"optimizers, which cannot be run: {type(error).__name__}: {error}".splitlines()[0]]


def _gradients(models: Any, inputs: Any, traces: tuple[Trace, Trace], forward: Diagnosis, dropout: bool) -> Diagnosis:
    """The diagnosis of the gradients; undecided if there are none, as of `lax.while_loop`."""
    try:
        return diagnose_gradients(models, inputs, traces, forward, dropout)
    except CaptureError as error:
        return Diagnosis("undecided", reason=str(error))


def _traces(models: Any, inputs: Any, dropout: bool) -> tuple[tuple[Trace, Trace], tuple[Defect, ...]]:
    """The traces, and the differences of their dropout."""
    if dropout:
        reference, candidate, masks = capture_in_training(models, inputs)
        return (reference, candidate), masks
    reference, candidate = (capture(model, given) for model, given in zip(models, inputs, strict=True))
    return (reference, candidate), ()


def _trained(trace: Trace) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(parameters, random gradients of theirs): an optimizer does not care where gradients come from."""
    random = np.random.default_rng(0)
    numbers = {n: i for n, i in trace.parameters.items() if trace.values[i].dtype.kind == "f"}
    parameters = {name: trace.values[number] for name, number in numbers.items()}
    return parameters, {name: random.standard_normal(value.shape) for name, value in parameters.items()}


def _converted(convert: Convert, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = getattr(convert, "__name__", "the converter")
    try:
        result = convert(arrays)
    except Exception as error:  # whatever the converter's code raises
        raise CaptureError(f"{name}: {type(error).__name__}: {error}".splitlines()[0]) from error
    leaves = jax.tree_util.tree_leaves_with_path(result)
    if not leaves:
        raise CaptureError(f"{name}: returns no arrays")
    return {dotted(path): np.asarray(leaf) for path, leaf in leaves}
