"""Whether two models that are equal in float64 differ by rounding only in float32 and bfloat16."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .capture.arrays import LARGE, dtype_of, is_narrow
from .capture.jax_models import as_function
from .capture.jax_trace import by_name
from .capture.models import is_torch
from .capture.trace import Trace, dotted, named
from .matching.matching import output_layout, output_pairs
from .matching.perturbation import REDRAWN, perturbed, varied_values
from .matching.weights import WeightMap

Array = np.ndarray
# Correct models may split operations differently: one float32 product of width 64 alone has a ratio of 2.0, because
# XLA and PyTorch add in another order, and a bias that PyTorch adds before it rounds to bfloat16 has up to 1.9.
RATIO_BOUND = 3.0
_INPUTS = 24
_HUGE = 2**26  # parameters from which on fewer inputs are enough: each gives many errors
_INPUTS_OF_HUGE = 4
_NUMBERS = 4096  # elements that the outputs of all inputs should have
_MOST = 64  # inputs
_ALIGNMENT = 64  # bytes
_WIDE = 1e3  # an error this many times smaller means a wider dtype
_UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-9}  # relative errors of rounding one number
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Rounding:
    """Errors of both models in one dtype against float64: root mean squares over all outputs, relative to theirs."""

    dtype: str
    reference: float
    candidate: float
    inputs: int
    failure: str = ""  # why it was not measured
    casts: tuple[str, ...] = ()  # the candidate's casts to a narrower dtype that explain it, the worst first

    @property
    def ratio(self) -> float:
        """candidate / reference."""
        return self.candidate / self.reference if self.reference else float("inf") if self.candidate else 1.0

    @property
    def ok(self) -> bool:
        """Whether the candidate's errors are at most RATIO_BOUND times the reference's."""
        return not self.failure and self.ratio <= RATIO_BOUND

    def __str__(self) -> str:
        if self.failure:
            return f"{self.dtype}: not measured: {self.failure}"
        text = "rounding only" if self.ok else "more than rounding"
        places = f"; because of {', '.join(self.casts)}" if self.casts else ""
        errors = f"{self.dtype}: errors {self.reference:.1e} and {self.candidate:.1e}, ratio {self.ratio:.2f}"
        return f"{errors}: {text}{places}"


def compare_rounding(
    models: tuple[Any, Any],
    inputs: tuple[Sequence[Any], Sequence[Any]],
    traces: tuple[Trace, Trace],
    weights: WeightMap,
) -> list[Rounding]:
    """The errors of two models with equal outputs in float64, over at least 24 inputs.

    Each run multiplies the inputs and weights by random factors near 1; equal numbers get equal factors.
    """
    ends = [(name, t.values.kept(i)) for t in traces for name, i in (t.parameters | t.outputs).items()]
    complex_names = [name for name, value in ends if value.dtype.kind == "c"]
    if complex_names:
        failure = f"{complex_names[0]}: complex numbers are compared in float64 only"
        return [Rounding(dtype, 0.0, 0.0, 0, failure) for dtype in DTYPES]
    size = sum(traces[0].values[n].size for n in traces[0].outputs.values())
    least = _INPUTS_OF_HUGE if _is_huge(traces[0]) else _INPUTS
    count = min(max(least, -(-_NUMBERS // max(size, 1))), _MOST)
    varied = varied_values(traces, weights)
    return [_measure(dtype, models, inputs, traces, varied, count) for dtype in DTYPES]


def _is_huge(trace: Trace) -> bool:
    return sum(trace.values.kept(n).size for n in trace.parameters.values()) >= _HUGE


def _measure(
    dtype: str, models: Any, inputs: Any, traces: tuple[Trace, Trace], varied: tuple[set[int], set[int]], count: int
) -> Rounding:
    squares, scale = np.zeros(2), 0.0
    pairs = [(n, o) for n, o in output_pairs(*traces) if traces[0].values[traces[0].outputs[n]].dtype.kind == "f"]
    oracles: list[dict[str, Array]] = []
    try:
        for side in (0, 1):  # one after the other: copies of both in this dtype may not fit into the memory
            narrow = _narrow(traces[side], dtype, computed=side == 0)
            run = _runner(models[side], inputs[side], narrow, dtype)
            for seed in range(count):
                changes = _perturbed(narrow, varied[side], seed, dtype)
                outputs = run(changes)
                if side == 0:
                    exact = narrow.replay(changes)
                    oracles.append({n: exact.get(i, narrow.values[i]) for n, i in narrow.outputs.items()})
                for pair in pairs:
                    oracle = oracles[seed][pair[0]]
                    if side == 0:
                        scale += float(np.square(oracle[np.isfinite(oracle)]).sum())
                    else:
                        oracle = _as_in_candidate(oracle, traces, pair)
                    squares[side] += _squared_error(outputs[pair[side]], oracle)
            del run, narrow
    except Exception as error:  # whatever the model's code raises in this dtype
        return Rounding(dtype, 0.0, 0.0, count, f"{type(error).__name__}: {error}".splitlines()[0])
    errors = np.sqrt(squares / (scale or 1.0))
    if not np.isfinite(errors[0]):
        failure = "the reference's outputs are not finite where those in float64 are"
        return Rounding(dtype, 0.0, 0.0, count, failure)
    failure = "the candidate computes in a wider dtype" if errors[1] * _WIDE < errors[0] else ""
    if 0 < errors[0] * _WIDE < min(errors[1], _UNITS[dtype]):
        failure = "the reference computes in a wider dtype"
    result = Rounding(dtype, float(errors[0]), float(errors[1]), count, failure)
    return result if result.ok or dtype != DTYPES[0] else replace(result, casts=_casts(traces[1], result.reference))


def _as_in_candidate(oracle: Array, traces: tuple[Trace, Trace], names: tuple[str, str]) -> Array:
    """An output of the reference in the arrangement of the candidate's."""
    value, target = (t.values[t.outputs[name]] for t, name in zip(traces, names, strict=True))
    layout = output_layout(value, target)
    return layout.apply(oracle) if layout is not None else oracle.reshape(target.shape)


def _squared_error(output: Array, oracle: Array) -> float:
    """The sum over finite elements; infinite if the others, such as the -inf of a masked logit, are not the same."""
    finite = np.isfinite(oracle)
    same = np.array_equal(output[~finite], oracle[~finite], equal_nan=True)
    return float(np.square(output[finite] - oracle[finite]).sum()) if same else float("inf")


def _casts(trace: Trace, error: float) -> tuple[str, ...]:
    """Casts of JAX to a narrower dtype than float32, each of which alone makes a larger error than rounding does."""
    places: dict[str, float] = {}
    for operation in trace.operations:
        dtype = operation.settings.get("new_dtype")
        if operation.name != "convert_element_type" or dtype is None or jnp.dtype(dtype).itemsize > 2:
            continue
        value = trace.values[operation.outputs[0]]
        if value.dtype.kind != "f" or not jnp.issubdtype(dtype, jnp.floating):
            continue
        changes = trace.replay({operation.outputs[0]: np.asarray(jnp.asarray(value, dtype), np.float64)})
        pairs = [(trace.values[n], changes.get(n, trace.values[n])) for n in trace.outputs.values()]
        floating = [(one, other) for one, other in pairs if one.dtype.kind == "f"]
        difference = sum(_squared_error(other, one) for one, other in floating)
        size = sum(float(np.square(one[np.isfinite(one)]).sum()) for one, _ in floating)
        effect = float(np.sqrt(difference / (size or 1.0)))
        if effect > RATIO_BOUND * error:
            text = f"{operation.line or operation.module} ({jnp.dtype(dtype).name})"
            places[text] = max(places.get(text, 0.0), effect)
    return tuple(sorted(places, key=lambda text: -places[text]))


def _narrow(trace: Trace, dtype: str, computed: bool) -> Trace:
    """A trace whose parameters and inputs the dtype can hold; what follows is computed anew if asked for."""
    ends = {*trace.parameters.values(), *trace.inputs.values()}
    floating = [n for n in ends if trace.values.kind(n) == "f"]
    changes = {n: _rounded(trace.values.kept(n), dtype) for n in floating}
    changes = {n: value for n, value in changes.items() if not _are_equal(value, trace.values.kept(n))}
    narrow = copy.copy(trace)
    narrow.values = trace.values.with_changes(trace.replay(changes) if computed else changes)
    return narrow


def _are_equal(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and (one is other or np.array_equal(one, other, equal_nan=True))


def _aligned(value: Array, dtype: np.dtype) -> Array:
    """A copy in this dtype, in memory that JAX can use as it is."""
    memory = np.empty(value.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copied = memory[start : start + value.size * dtype.itemsize].view(dtype).reshape(value.shape)
    copied[...] = value
    return copied


def _rounded(value: Array, dtype: str) -> Array:
    """The numbers that the dtype holds, in float64; of a large array in the dtype itself."""
    if value.dtype == dtype:
        return value if is_narrow(value) else value.astype(np.float64)
    if is_narrow(value):
        return _aligned(value, np.dtype(dtype))
    import torch

    return torch.from_numpy(np.array(value)).to(getattr(torch, dtype)).double().numpy()


def _perturbed(trace: Trace, varied: set[int], seed: int, dtype: str) -> dict[int, Array]:
    """New numbers for these values, which the dtype can hold."""
    return {n: _rounded(value, dtype) for n, value in perturbed(trace, varied, seed, REDRAWN).items()}


Run = Callable[[Mapping[int, Array]], Mapping[str, Array]]  # changes of a trace's values -> outputs by name


def _runner(model: Any, inputs: Sequence[Any], trace: Trace, dtype: str) -> Run:
    if is_torch(model):
        return _torch_runner(model, inputs, trace, dtype)
    return _jax_runner(model, inputs, trace, dtype)


def _torch_runner(model: Any, inputs: Sequence[Any], trace: Trace, dtype: str) -> Run:
    import torch

    from .capture.torch_trace import as_tensor

    function, parameters = model if isinstance(model, tuple) else (None, None)
    narrow = getattr(torch, dtype)
    module: Any = None
    if isinstance(model, torch.nn.Module):  # its large parameters are given in each call
        large = {id(p): torch.nn.Parameter(torch.empty(0)) for p in model.parameters() if p.numel() >= LARGE}
        module = copy.deepcopy(model, large).to("cpu", narrow)

    def tensor(value: Array) -> torch.Tensor:
        whole = as_tensor(value) if is_narrow(value) else torch.from_numpy(np.array(value))
        return whole.to(narrow) if whole.is_floating_point() else whole

    arrays = _Arrays(trace, tensor)
    written = trace.outputs.keys() & trace.parameters.keys()

    def parameter(number: int, changes: Mapping[int, Array]) -> torch.Tensor:
        value = arrays.array(number, changes)
        if not trace.derived and not written:
            return value
        return value.clone().requires_grad_(bool(trace.derived) and value.is_floating_point())

    def run(changes: Mapping[int, Array]) -> Mapping[str, Array]:
        arguments = arrays.tree(tuple(inputs), trace.inputs, changes)
        values = {name: parameter(number, changes) for name, number in trace.parameters.items()}
        with torch.set_grad_enabled(bool(trace.derived)):
            if function is None:
                result = torch.func.functional_call(module, values, arguments, tie_weights=False)
            else:
                result = function(_replaced(parameters, values), *arguments)
        leaves = {name: values[name] for name in written} | dict(named(result))
        return {n: leaf.detach().double().numpy() for n, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}

    return run


def _jax_runner(model: Any, inputs: Sequence[Any], trace: Trace, dtype: str) -> Run:
    function, parameters = as_function(model)

    def called(parameters: Any, inputs: Any) -> Any:
        return function(parameters, *inputs)

    # As one program, XLA converts all weights in bfloat16 to float32 at once.
    called = called if _is_huge(trace) else jax.jit(called)
    arrays = _Arrays(trace, lambda value: jnp.asarray(value, dtype if dtype_of(value.dtype).kind == "f" else None))

    def run(changes: Mapping[int, Array]) -> Mapping[str, Array]:
        with jax.enable_x64(False), jax.default_matmul_precision("highest"):
            given = arrays.tree(parameters, trace.parameters, changes)
            result = called(given, arrays.tree(tuple(inputs), trace.inputs, changes))
        return {name: np.asarray(leaf, np.float64) for name, leaf in by_name(result).items()}

    return run


class _Arrays:
    """A trace's values as arrays of a framework; those that do not change are converted once."""

    def __init__(self, trace: Trace, convert: Callable[[Array], Any]):
        self.trace, self.convert = trace, convert
        self.converted: dict[int, Any] = {}

    def array(self, number: int, changes: Mapping[int, Array]) -> Any:
        """The value with this number, as changed."""
        if number in changes:
            return self.convert(changes[number])
        if number not in self.converted:
            self.converted[number] = self.convert(self.trace.values.kept(number))
        return self.converted[number]

    def tree(self, tree: Any, numbers: Mapping[str, int], changes: Mapping[int, Array]) -> Any:
        """A tree of parameters or inputs with these values."""
        return _replaced(tree, {name: self.array(number, changes) for name, number in numbers.items()})


def _replaced(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """A tree with other leaves, by name."""
    return jax.tree_util.tree_map_with_path(lambda path, old: arrays.get(dotted(path), old), tree)
