"""Values that the candidate rounds to a narrower dtype: equal in float64, and seen in float32 alone."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.external_pairs.backward import Model, Run, is_float, jaxpr_of, places, with_change
from benchmarks.external_pairs.forward import Checked, passed_criteria
from benchmarks.external_pairs.scores import Score, by_operator, report, sample
from twinax.compare.capture.jax_models import as_function
from twinax.compare.capture.models import capture
from twinax.compare.capture.trace import Trace
from twinax.compare.rounding import compare_rounding

DTYPES = ("bfloat16", "float16")
CRITERIA = ("atol 1e-02", "atol 1e-03", "atol 1e-04", "atol 1e-05", "KL 0.015", "cosine 0.999")
_PAIRS = ("Linen decoder layer", "Equinox MLP", "d2l_note", "twins, pre-norm, gelu", "transformers BART", "bonsai ViT")
_EXACT = ("max", "gather", "reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "select_n", "concatenate")
_EFFECT = 1e-4  # of the outputs; what changes them by less is not told from rounding in float32


@dataclass(frozen=True)
class _Site:
    operator: str
    detail: str
    line: str
    model: Callable[[], Model]
    plant: Callable[[], Trace | None]


def _sites(entry: Checked) -> Iterator[_Site]:
    """Every value that an operation computes, in each dtype."""
    function, parameters = as_function(entry.pair.candidate)
    jaxpr = jaxpr_of(function, parameters, entry.inputs[1])
    trained = {variable for variable in jaxpr.invars if is_float(variable)}
    for place in places(jaxpr, trained):
        if place.equation.primitive.name in ("jit", "pjit", "scan", *_EXACT):
            continue
        for dtype in DTYPES:
            model = partial(with_change, function, parameters, place.path, partial(_rounded, dtype))
            plant = partial(_planted, entry, model)
            yield _Site(f"rounded to {dtype}", place.equation.primitive.name, place.line, model, plant)


def _rounded(dtype: str, run: Run, inputs: Sequence[Any], _: Any) -> list[Any]:
    outputs = run(inputs)
    return [x.astype(dtype).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in outputs]


def _planted(entry: Checked, model: Callable[[], Model]) -> Trace | None:
    """The candidate's trace with the outputs that it has in float32; None if they are hardly other ones."""
    function, parameters = model()
    trace = capture((function, parameters), entry.inputs[1])
    narrow = jax.tree.map(lambda a: jnp.asarray(a, "float32" if np.asarray(a).dtype.kind == "f" else None), parameters)
    inputs = [jnp.asarray(a, "float32" if np.asarray(a).dtype.kind == "f" else None) for a in entry.inputs[1]]
    with jax.enable_x64(False), jax.default_matmul_precision("highest"):
        outputs = jax.tree.leaves(function(narrow, *inputs))
    values = trace.values.with_changes({})
    effect = 0.0
    for number, output in zip(trace.outputs.values(), outputs, strict=True):
        effect = max(effect, float(np.abs(values[number] - output).max() / np.abs(values[number]).max(initial=1e-300)))
        values[number] = np.asarray(output, np.float64)
    trace.values = values
    return trace if effect > _EFFECT else None


def measure(checked: Mapping[str, Checked], seed: int, count: int) -> list[Score]:
    """The score of each sampled defect."""
    checked = {name: entry for name, entry in checked.items() if name in _PAIRS}
    stock = {name: by_operator(list(_sites(entry)), lambda site: site.operator) for name, entry in checked.items()}
    scores = []
    for name, site, planted in sample(stock, seed, count):
        entry, model = checked[name], site.model()
        assert isinstance(planted, Trace)
        assert entry.diagnosis.weights is not None
        start = time.perf_counter()
        traces = entry.traces[0], capture(model, entry.inputs[1])
        errors = compare_rounding((entry.pair.reference, model), entry.inputs, traces, entry.diagnosis.weights)
        seconds = time.perf_counter() - start
        casts = next((error.casts for error in errors if error.casts), ())
        named = [cast.rpartition(" (")[0] for cast in casts]
        detected = any(not error.ok and not error.failure for error in errors)
        scores.append(
            Score(
                name,
                site.operator,
                site.detail,
                site.line,
                detected,
                is_first=named[:1] == [site.line],
                is_inside=site.line in named,
                is_repaired=False,
                is_alone=len(named) == 1,
                named="; ".join(map(str, errors)),
                seconds=seconds,
                passed=passed_criteria(entry.traces[1], planted),
            )
        )
        report(len(scores), scores[-1], scores[-1].named)
    return scores
