"""Finds out what a converter does by running it on distinct integers, which float32 holds exactly."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..capture.trace import named
from ..matching.weights import WeightMap, match_weights

Array = np.ndarray
_MOST = 2**25  # numbers of the reference's parameters, whose copies would take too much memory
_BASE = 2**22  # a sum of two digits is exact in float32


def probe_converter(convert: Callable[[dict[str, Array]], Any], reference: Mapping[str, Array]) -> WeightMap:
    """The map that a converter applies, whatever the values are.

    convert: takes a dict of arrays by the reference's names, and returns any nested dict of arrays. It may arrange,
    split, pack, pad, add and shift, and must not look at values. It is called twice, or three times if there are more
    than 4 million numbers.
    reference: the reference's parameters; their shapes and dtypes are used. Integers are passed on as they are.
    """
    shapes = {name: np.asarray(a).shape for name, a in reference.items() if np.asarray(a).dtype.kind not in "biu"}
    numbers = _numbers(shapes)
    total = sum(array.size for array in numbers.values())
    offset = _converted(convert, reference, {name: np.zeros(shape) for name, shape in shapes.items()})
    combined = {name: np.zeros(array.shape) for name, array in offset.items()}
    for digit in range(1 if total < _BASE else int(np.ceil(np.log(total + 1) / np.log(_BASE)))):
        part = {name: array // _BASE**digit % _BASE for name, array in numbers.items()}
        for name, array in _converted(convert, reference, part).items():
            combined[name] = combined[name] + (array - offset[name]) * _BASE**digit
    weights = match_weights(numbers, combined)
    return replace(weights, matches={n: _with_offset(m, offset[n]) for n, m in weights.matches.items()})


def completed(
    weights: WeightMap,
    convert: Callable[[dict[str, Array]], Any],
    reference: Mapping[str, Array],
    candidate: Mapping[str, Array],
) -> WeightMap:
    """The map, completed by probing: parameters that repeat a single value do not reveal their sources."""
    constant = [name for name, array in candidate.items() if array.size and (array == array.flat[0]).all()]
    if not constant or sum(np.asarray(array).size for array in reference.values()) > _MOST:
        return weights
    try:
        probed = probe_converter(convert, reference).matches
    except Exception:  # whatever a converter that looks at values raises
        return weights
    matches = {**weights.matches, **{name: probed[name] for name in constant if name in probed}}
    used = {source for match in matches.values() for source in match.sources}
    return replace(
        weights,
        matches={name: matches[name] for name in candidate if name in matches},
        ambiguous={name: sources for name, sources in weights.ambiguous.items() if name not in matches},
        unused=tuple(name for name in weights.unused if name not in used),
    )


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Distinct integers from 1 in random order, so that no sum of two looks like an arrangement."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    shuffled = np.random.default_rng(0).permutation(sum(sizes)) + 1
    parts = np.split(shuffled, np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _converted(convert: Any, reference: Mapping[str, Array], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What the converter returns for these numbers, by path, in float64."""
    whole = {name: np.asarray(array) for name, array in reference.items()}
    given = {name: array.astype(np.float32) for name, array in arrays.items()}
    return {name: np.asarray(leaf).astype(np.float64) for name, leaf in named(convert({**whole, **given}))}


def _with_offset(match: Any, offset: Array) -> Any:
    """The match with what the converter adds to all sources, such as -1 for norms that store scale - 1."""
    inner = {float(number) for part in match.parts for number in np.unique(offset[part.region])}
    shift = inner.pop() if len(inner) == 1 else 0.0
    outside = np.ones(offset.shape, bool)
    for part in match.parts:
        outside[part.region] = False
    padding = float(offset[outside][0]) if outside.any() else match.padding
    return replace(match, shift=int(shift) if shift == int(shift) else shift, padding=padding)
