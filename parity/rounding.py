"""Whether two models that are equal in float64 differ by rounding only in float32 and bfloat16."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .capture.jax_models import as_function
from .capture.jax_trace import dotted
from .capture.trace import Trace, named
from .matching import ROUNDED, find_arrangement, output_pairs
from .weights import WeightMap

Array = np.ndarray
# Correct models may divide their operations otherwise: one float32 product of width 64 alone has a ratio of 2.0, as
# XLA and PyTorch add in another order, and a bias that PyTorch adds before it rounds to bfloat16 has up to 1.9.
RATIO_BOUND = 3.0
_INPUTS = 24
_NUMBERS = 4096  # that the outputs of all inputs should have
_MOST = 64  # inputs
_PERTURBATION = 1e-3  # relative; errors of rounding are drawn anew by it
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

    Each input is the given one and the given weights, multiplied by random factors near 1: the same for equal numbers.
    """
    size = sum(traces[0].values[n].size for n in traces[0].outputs.values())
    count = min(max(_INPUTS, -(-_NUMBERS // max(size, 1))), _MOST)
    fixed = [_fixed(trace, weights) for trace in traces]
    return [_measure(dtype, models, inputs, traces, fixed, count) for dtype in DTYPES]


def _measure(
    dtype: str, models: Any, inputs: Any, traces: tuple[Trace, Trace], fixed: Sequence[set[str]], count: int
) -> Rounding:
    squares, scale = np.zeros(2), 0.0
    try:
        runs = [_runner(model, dtype, given) for model, given in zip(models, inputs, strict=True)]
        for seed in range(count):
            changes = [_perturbed(trace, names, seed, dtype) for trace, names in zip(traces, fixed, strict=True)]
            exact = traces[0].replay(changes[0])
            outputs = [run(trace, change) for run, trace, change in zip(runs, traces, changes, strict=True)]
            for name, other in output_pairs(*traces):
                number = traces[0].outputs[name]
                oracle = exact.get(number, traces[0].values[number])
                if oracle.dtype.kind != "f":
                    continue
                target = traces[1].values[traces[1].outputs[other]]
                layout = None
                if oracle.shape != target.shape:
                    layout = find_arrangement(traces[0].values[number], target, ROUNDED)
                second = layout.apply(oracle) if layout is not None else oracle.reshape(target.shape)
                squares += [np.square(outputs[0][name] - oracle).sum(), np.square(outputs[1][other] - second).sum()]
                scale += float(np.square(oracle).sum())
    except Exception as error:  # whatever the model's code raises in this dtype
        return Rounding(dtype, 0.0, 0.0, count, f"{type(error).__name__}: {error}".splitlines()[0])
    errors = np.sqrt(squares / (scale or 1.0))
    result = Rounding(dtype, float(errors[0]), float(errors[1]), count)
    return result if result.ok or dtype != DTYPES[0] else replace(result, casts=_casts(traces[1], result.reference))


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
        difference, size = (
            sum(float(np.square(part).sum()) for part in parts)
            for parts in zip(*((one - other, one) for one, other in pairs if one.dtype.kind == "f"), strict=True)
        )
        effect = float(np.sqrt(difference / (size or 1.0)))
        if effect > RATIO_BOUND * error:
            text = f"{operation.line or operation.module} ({jnp.dtype(dtype).name})"
            places[text] = max(places.get(text, 0.0), effect)
    return tuple(sorted(places, key=lambda text: -places[text]))


def _fixed(trace: Trace, weights: WeightMap) -> set[str]:
    """Parameters that are sums or shifted, which keep their values."""
    names = {n for m in weights.matches.values() if m.added_to or m.shift for n in (m.name, *m.sources)}
    return names & trace.parameters.keys()


def _perturbed(trace: Trace, fixed: set[str], seed: int, dtype: str) -> dict[int, Array]:
    """New values of parameters and inputs, which the dtype can hold."""
    numbers = [n for name, n in trace.parameters.items() if name not in fixed]
    numbers += [n for name, n in trace.inputs.items() if trace.values[n].dtype.kind == "f"]
    phase = np.random.default_rng(seed).uniform(0, 1e3)
    values = {n: trace.values[n] for n in numbers if trace.values[n].dtype.kind == "f"}
    narrow = {n: v * (1 + _PERTURBATION * np.sin(1e5 * v + phase)) for n, v in values.items()}
    return {n: np.asarray(jnp.asarray(v, dtype).astype("float32"), np.float64) for n, v in narrow.items()}


Run = Callable[[Trace, Mapping[int, Array]], Mapping[str, Array]]  # (trace, changes) -> outputs by name


def _runner(model: Any, dtype: str, inputs: Sequence[Any]) -> Run:
    leaves = [leaf for _, leaf in named(model[1])] if isinstance(model, tuple) else [model]
    if any(isinstance(leaf, torch.nn.Module | torch.Tensor) for leaf in leaves):
        return _torch_runner(model, getattr(torch, dtype), inputs)
    return _jax_runner(model, dtype, inputs)


def _torch_runner(model: Any, dtype: torch.dtype, inputs: Sequence[Any]) -> Run:
    function, parameters = model if isinstance(model, tuple) else (None, None)
    module: Any = copy.deepcopy(model).to("cpu", dtype) if isinstance(model, torch.nn.Module) else None

    def run(trace: Trace, changes: Mapping[int, Array]) -> Mapping[str, Array]:
        values = {name: _tensor(changes.get(n, trace.values[n]), dtype) for name, n in trace.parameters.items()}
        arguments = _rebuilt(tuple(inputs), trace.inputs, trace, changes, lambda a: _tensor(a, dtype))
        with torch.no_grad():
            if function is None:
                result = torch.func.functional_call(module, values, arguments, tie_weights=False)  # all are given
            else:
                tree = _rebuilt(parameters, trace.parameters, trace, changes, lambda a: _tensor(a, dtype))
                result = function(tree, *arguments)
        return {name: leaf.double().numpy() for name, leaf in named(result) if isinstance(leaf, torch.Tensor)}

    return run


def _jax_runner(model: Any, dtype: str, inputs: Sequence[Any]) -> Run:
    function, parameters = as_function(model)
    compiled = jax.jit(lambda p, i: function(p, *i))

    def array(value: Array) -> jax.Array:
        return jnp.asarray(value, dtype if value.dtype.kind == "f" else None)

    def run(trace: Trace, changes: Mapping[int, Array]) -> Mapping[str, Array]:
        with jax.enable_x64(False), jax.default_matmul_precision("highest"):
            given = _rebuilt(parameters, trace.parameters, trace, changes, array)
            result = compiled(given, _rebuilt(tuple(inputs), trace.inputs, trace, changes, array))
        return {name: np.asarray(leaf, np.float64) for name, leaf in named(result)}

    return run


def _rebuilt(tree: Any, names: Mapping[str, int], trace: Trace, changes: Mapping[int, Array], make: Any) -> Any:
    """A tree whose arrays are a trace's values."""

    def leaf(path: Any, old: Any) -> Any:
        number = names.get(dotted(path))
        return old if number is None else make(changes.get(number, trace.values[number]))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _tensor(value: Array, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(value))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
