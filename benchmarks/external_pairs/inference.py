"""How many parameters are inferred, names unused, where the port of each pair has other weights than the reference."""

import time
from collections.abc import Container, Iterator, Mapping

import numpy as np

from benchmarks.external_pairs.forward import Checked
from benchmarks.external_pairs.scores import ERROR
from twinax.compare.capture.parameters import arrays_of, with_arrays
from twinax.compare.weight_map.inference import Inference, infer_weights, learned_parameters, randomized
from twinax.compare.weight_map.rules import apply_rules

HEADER = ("pair", "parameters", "right", "asked for", "wrong", "seconds")
_SEED = 0
Array = np.ndarray


def measure(checked: Mapping[str, Checked]) -> Iterator[tuple[str, ...]]:
    """Rows: parameters of the port that training changes, and what is inferred for them; then all pairs together."""
    total = np.zeros(4, int)
    for name, entry in checked.items():
        pair = entry.pair
        arrays, state = arrays_of(pair.candidate), arrays_of(pair.reference)
        other = with_arrays(pair.candidate, _initialized(arrays, _tables(entry)))
        start = time.perf_counter()
        inference = infer_weights(pair.reference, other, pair.inputs, pair.candidate_inputs)
        seconds = time.perf_counter() - start
        counts = _counts(inference, state, arrays)
        total += counts
        yield name, *map(str, counts), f"{seconds:.1f}"
        ERROR.print(name, *counts, f"{seconds:.1f}", sep="; ")
    yield "all", *map(str, total), ""


def _tables(entry: Checked) -> set[str]:
    """Parameters of the port that do not change with the reference's weights, such as sinusoidal positions."""
    reference, candidate = entry.traces
    parameters = entry.pair.reference.named_parameters(remove_duplicate=False)
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    return candidate.parameters.keys() - learned_parameters(candidate, randomized(reference, trained, _SEED))


def _initialized(arrays: Mapping[str, Array], tables: Container[str]) -> dict[str, Array]:
    """Other random numbers for parameters; equal ones, which may be tied, stay equal, and tables stay."""
    random = np.random.default_rng(_SEED)
    equal: dict[bytes, Array] = {}
    changed = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and name not in tables:
            new = random.standard_normal(array.shape).astype(array.dtype)
            changed[name] = equal.setdefault(array.tobytes(), new)
    return changed


def _counts(inference: Inference, state: Mapping[str, Array], arrays: Mapping[str, Array]) -> tuple[int, ...]:
    """(parameters, right, asked for, wrong): right are those that get the values of the correct port."""
    shapes = {name: array.shape for name, array in arrays.items()}
    learned = [name for name in arrays if name not in inference.fixed]
    inferred = apply_rules(inference.weights.matches, dict(state), shapes)
    right = [n for n in learned if n in inferred and np.allclose(inferred[n], arrays[n], rtol=1e-5, atol=1e-6)]
    asked = [n for n in learned if n in inference.questions]
    return len(learned), len(right), len(asked), len(learned) - len({*right, *asked})
