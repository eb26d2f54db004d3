"""Mistakes in a converter: the function that returns the candidate's parameters from the reference's.

The correct converter of a pair applies the map that the comparison finds by values. Each mistake changes what it
returns for one parameter, or for those that it confuses; then both models are compared with the mistaken converter.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.external_pairs.forward import CRITERIA, Checked, false_alarms, passed_criteria
from benchmarks.external_pairs.layers import CONVERTED
from benchmarks.external_pairs.planting import Planted, planted_parameters
from benchmarks.external_pairs.scores import ERROR, Score, by_operator, report, sample
from twinax.compare.capture.parameters import arrays_of, with_arrays
from twinax.compare.comparison import Comparison, Convert, compare
from twinax.compare.matching.arrangements import Layout, merged
from twinax.compare.matching.weights import Match, Part
from twinax.compare.repair.defect import Defect
from twinax.compare.weight_map.rules import apply_rules

__all__ = ["CRITERIA", "Converter", "Mistake", "compared", "measure", "mistakes"]

Array = np.ndarray
Arrays = dict[str, Array]
_GATES = {
    "weight_ih": (3, 4),
    "weight_hh": (3, 4),
    "bias_ih": (3, 4),
    "cell.bias": (3, 4),
    "in_proj": (3,),
    "qkv": (3,),
}


@dataclass(frozen=True)
class Converter:
    """The correct converter of a pair, by its map."""

    matches: Mapping[str, Match]
    own: Mapping[str, Array]  # the candidate's parameters

    def __call__(self, state: Mapping[str, Array]) -> Arrays:
        """The candidate's parameters; those without a source are left out and keep their values."""
        wide = {name: np.asarray(array, np.float64) for name, array in state.items()}
        arrays = apply_rules(self.matches, wide, {name: self.own[name].shape for name in self.matches})
        return {name: array.astype(self.own[name].dtype) for name, array in arrays.items()}


@dataclass(frozen=True)
class Mistake:
    """A change to what a converter returns."""

    operator: str
    detail: str
    parameters: tuple[str, ...]  # of the candidate, those with wrong values
    change: Callable[[Arrays, Arrays], Arrays]  # (all that is correct, the reference's) -> those with wrong values
    forgotten: bool = False  # the converter does not return them, so they keep their initial values


def mistakes(converter: Converter, state: Arrays) -> Iterator[Mistake]:
    """Every mistake that the converter of a pair can have."""
    correct = {name: array for name, array in converter(state).items() if array.dtype.kind == "f" and array.size > 1}
    for name, array in correct.items():
        match = converter.matches[name]
        sources = {part.source: state[part.source] for part in match.parts}
        yield from _of_layout(converter, match, array, sources)
        yield from _of_values(converter, match, array)
        yield from _of_groups(converter, match, array)
    yield from _squares(converter, correct)
    yield from _of_two(converter, correct)


def _again(converter: Converter, *matches: Match) -> Callable[[Arrays, Arrays], Arrays]:
    """The change to other matches."""
    return lambda _, state: replace(converter, matches={match.name: match for match in matches})(state)


def _on(name: str, function: Callable[[Array], Array]) -> Callable[[Arrays, Arrays], Arrays]:
    """The change of one parameter after it was converted."""
    return lambda correct, _: {name: function(correct[name]).astype(correct[name].dtype)}


def _of_layout(converter: Converter, match: Match, array: Array, sources: Arrays) -> Iterator[Mistake]:
    """Mistakes in how the numbers are arranged."""
    name, (source, *_) = match.name, sources.values()
    if len(match.parts) == 1 and match.padding is None:
        (part,) = match.parts
        if _is_transposed_square(part):
            yield Mistake("square matrix not transposed", name, (name,), _again(converter, _untransposed(match)))
        elif array.ndim > 2 and _in_source_order(part.layout) != part.layout:
            yield Mistake("reshaped, not transposed", name, (name,), _again(converter, _untransposed(match)))
        elif array.ndim == 2 and array.shape[0] == array.shape[1]:
            yield Mistake("square matrix transposed", name, (name,), _on(name, np.transpose))
    for axis in range(array.ndim - 1):
        if array.ndim > source.ndim and min(array.shape[axis : axis + 2]) > 1 and _is_split(match, axis):
            yield Mistake("heads split in the other order", name, (name,), _on(name, partial(_other_split, axis)))
    if array.ndim == source.ndim > 2 and prod(source.shape[2:]) > 1 and len(match.parts) == 1:
        flipped = partial(_from_other, converter, match, lambda a: np.flip(a, tuple(range(2, a.ndim))))
        yield Mistake("kernel flipped", name, (name,), flipped)
    for index, part in enumerate(match.parts):
        row = prod(sources[part.source].shape[1:])
        for step in (-row, row):
            moved = replace(part, layout=replace(part.layout, start=part.layout.start + step))
            if sources[part.source].ndim == 2 and array.shape[1:] == sources[part.source].shape[1:] and _fits(moved):
                parts = (*match.parts[:index], moved, *match.parts[index + 1 :])
                detail = f"{name}, rows moved by {step // row}"
                yield Mistake("rows off by one", detail, (name,), _again(converter, replace(match, parts=parts)))
    if match.padding is not None:
        yield Mistake("rows off by one", f"{name}, padded before", (name,), _on(name, lambda a: np.roll(a, 1, 0)))


def _is_transposed_square(part: Part) -> bool:
    axes = part.layout.axes
    return len(axes) == 2 and axes[0][0] == axes[1][0] and abs(axes[0][1]) < abs(axes[1][1])


def _in_source_order(layout: Layout) -> Layout:
    return replace(layout, axes=merged(sorted(layout.axes, key=lambda axis: -abs(axis[1]))))


def _untransposed(match: Match) -> Match:
    (part,) = match.parts
    return replace(match, parts=(replace(part, layout=_in_source_order(part.layout)),))


def _is_split(match: Match, axis: int) -> bool:
    """Whether two neighboring axes of a parameter are one axis of its source."""
    if len(match.parts) != 1 or match.padding is not None:
        return False
    layout = match.parts[0].layout
    index = layout.apply(np.arange(layout.source_size))
    joined = index.reshape(*index.shape[:axis], -1, *index.shape[axis + 2 :])
    return len(np.unique(np.diff(joined, axis=axis))) == 1


def _other_split(axis: int, array: Array) -> Array:
    """The axes split as (size of a head, heads), as in code that mixes up the two numbers."""
    heads, size = array.shape[axis : axis + 2]
    other = (*array.shape[:axis], size, heads, *array.shape[axis + 2 :])
    return array.reshape(other).swapaxes(axis, axis + 1)


def _from_other(
    converter: Converter, match: Match, function: Callable[[Array], Array], _: Arrays, state: Arrays
) -> Arrays:
    """The parameter made from a changed source."""
    source = match.parts[0].source
    changed = {**state, source: function(state[source])}
    return replace(converter, matches={match.name: match})(changed)


def _fits(part: Part) -> bool:
    layout = part.layout
    low = layout.start + sum((size - 1) * stride for size, stride in layout.axes if stride < 0)
    high = layout.start + sum((size - 1) * stride for size, stride in layout.axes if stride > 0)
    return low >= 0 and high < layout.source_size


def _of_values(converter: Converter, match: Match, array: Array) -> Iterator[Mistake]:
    """Mistakes in the numbers."""
    name = match.name
    for dtype in ("bfloat16", "float16"):
        rounded = partial(_rounded, dtype)
        yield Mistake(f"rounded to {dtype}", name, (name,), _on(name, rounded))
    initial = initial_values(name, array)
    yield Mistake("forgotten", name, (name,), lambda *_: {name: initial}, forgotten=True)
    if match.shift:
        yield Mistake("shift forgotten", name, (name,), _again(converter, replace(match, shift=0)))
    if match.added_to:
        other = tuple(replace(part, source=match.added_to) for part in match.parts)
        for parts, missing in ((match.parts, match.added_to), (other, match.parts[0].source)):
            change = _again(converter, replace(match, parts=parts, added_to=""))
            yield Mistake("sum without one term", f"{name} without {missing}", (name,), change)


def _rounded(dtype: str, array: Array) -> Array:
    return np.asarray(jnp.asarray(array, dtype), array.dtype)


def initial_values(name: str, array: Array) -> Array:
    """What a new model has: zeros for a bias, ones for a norm's scale, random numbers for all others."""
    is_bias = any(word in name.rpartition(".")[2] for word in ("bias", "beta", "shift"))
    if array.ndim == 1 or is_bias:
        return np.full_like(array, 0.0 if is_bias else 1.0)
    random = np.random.default_rng(0).standard_normal(array.shape)
    return (random * array.std()).astype(array.dtype)


def _of_groups(converter: Converter, match: Match, array: Array) -> Iterator[Mistake]:
    """The parts of a packed parameter in another order."""
    name = match.name
    if len(match.parts) > 1:
        for i, j in combinations(range(len(match.parts)), 2):
            if match.parts[i].layout.shape == match.parts[j].layout.shape and not match.added_to:
                parts = list(match.parts)
                parts[i], parts[j] = (
                    replace(parts[j], region=parts[i].region),
                    replace(parts[i], region=parts[j].region),
                )
                change = _again(converter, replace(match, parts=tuple(parts)))
                yield Mistake("packed in another order", f"{name}, parts {i} and {j}", (name,), change)
        return
    counts = next((counts for word, counts in _GATES.items() if word in name), ())
    count = next((n for n in reversed(counts) if array.shape[0] % n == 0 and array.shape[0] > n), 0)
    for i, j in combinations(range(count), 2):
        change = _on(name, partial(_blocks_exchanged, count, i, j))
        yield Mistake("packed in another order", f"{name}, blocks {i} and {j} of {count}", (name,), change)


def _blocks_exchanged(count: int, i: int, j: int, array: Array) -> Array:
    blocks = np.split(array, count, 0)
    blocks[i], blocks[j] = blocks[j], blocks[i]
    return np.concatenate(blocks)


def _squares(converter: Converter, correct: Arrays) -> Iterator[Mistake]:
    """A converter that transposes matrices only where the shapes differ."""
    names = [
        name
        for name in correct
        if len(converter.matches[name].parts) == 1
        and converter.own[name].ndim == 2
        and _is_transposed_square(converter.matches[name].parts[0])
    ]
    if len(names) > 1:
        change = _again(converter, *(_untransposed(converter.matches[name]) for name in names))
        yield Mistake("no square matrix transposed", f"{len(names)} of them", tuple(names), change)


def _of_two(converter: Converter, correct: Arrays) -> Iterator[Mistake]:
    """Two parameters exchanged, parts of a packed source exchanged, and the second use of a tied one forgotten."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    by_source: dict[str, list[str]] = {}
    for name, array in correct.items():
        by_shape.setdefault(array.shape, []).append(name)
        for source in converter.matches[name].sources:
            by_source.setdefault(source, []).append(name)
    for names in by_shape.values():
        for one, other in pairwise(names):
            packed = set(converter.matches[one].sources) & set(converter.matches[other].sources)
            operator = "unpacked in another order" if packed else "exchanged"
            change = partial(_exchanged, one, other)
            yield Mistake(operator, f"{one}, {other}", (one, other), change)
    for names in by_source.values():
        for one, other in combinations(names, 2):
            if converter.matches[one].parts == converter.matches[other].parts:
                initial = initial_values(other, correct[other])
                change = partial(_constant, other, initial)
                yield Mistake("tied use forgotten", f"{other}, tied to {one}", (other,), change, forgotten=True)


def _exchanged(one: str, other: str, correct: Arrays, _: Arrays) -> Arrays:
    return {one: correct[other], other: correct[one]}


def _constant(name: str, value: Array, *_: Arrays) -> Arrays:
    return {name: value}


@dataclass(frozen=True)
class _Site:
    operator: str
    detail: str
    mistake: Mistake
    plant: Callable[[], Planted | None]


def _sites(entry: Checked, converter: Converter, state: Arrays) -> Iterator[_Site]:
    for mistake in mistakes(converter, state):
        yield _Site(mistake.operator, mistake.detail, mistake, partial(_effect, entry, converter, state, mistake))


def _effect(entry: Checked, converter: Converter, state: Arrays, mistake: Mistake) -> Planted | None:
    """The candidate's trace with the wrong values; None if the outputs hardly change."""
    return planted_parameters(entry.traces[1], mistake.change(converter(state), state))


def compared(entry: Checked, converter: Converter, state: Arrays, mistake: Mistake) -> Comparison:
    """The comparison with the mistaken converter."""
    candidate = entry.pair.candidate
    if mistake.forgotten:
        candidate = with_arrays(candidate, mistake.change({}, {}))

    def mistaken(arrays: Arrays) -> Arrays:
        correct = converter(arrays)
        if mistake.forgotten:
            return {name: array for name, array in correct.items() if name not in mistake.parameters}
        return correct | mistake.change(correct, arrays)

    return _compared(entry, candidate, mistaken)


def _compared(entry: Checked, candidate: Any, convert: Convert) -> Comparison:
    return compare(entry.pair.reference, candidate, *entry.inputs, convert=convert, rounding=False)


def measure(checked: Mapping[str, Checked], seed: int, count: int) -> list[Score]:
    """The score of each sampled mistake."""
    checked = {**checked, **false_alarms(CONVERTED)[0]}
    converters: dict[str, tuple[Converter, Arrays]] = {}
    for name, entry in checked.items():
        assert entry.diagnosis.weights is not None
        own = arrays_of(entry.pair.candidate)
        converters[name] = Converter(entry.diagnosis.weights.matches, own), arrays_of(entry.pair.reference)
    stock = {
        name: by_operator(list(_sites(checked[name], *given)), lambda site: site.operator)
        for name, given in converters.items()
    }
    scores: list[Score] = []
    for name, site, planted in sample(stock, seed, count):
        assert isinstance(planted, Planted)
        entry, given = checked[name], converters[name]
        if name not in {score.pair for score in scores}:
            correct = _compared(entry, entry.pair.candidate, given[0])
            if not correct.ok:
                ERROR.print(f"[bold red]FALSE ALARM: {name}, with the correct converter: {correct}")
        start = time.perf_counter()
        comparison = compared(entry, *given, site.mistake)
        seconds = time.perf_counter() - start
        first = next(iter(comparison.forward.defects), None)
        sources = {source for p in site.mistake.parameters for source in given[0].matches[p].sources}
        is_named = [_is_named(defect, site.mistake.parameters, sources) for defect in comparison.forward.defects]
        scores.append(
            Score(
                name,
                site.operator,
                site.detail,
                ", ".join(site.mistake.parameters),
                not comparison.ok,
                is_first=is_named[:1] == [True],
                is_inside=any(is_named),
                is_repaired=first is not None and first.repair is not None,
                is_alone=bool(is_named) and all(is_named),
                named=str(first or comparison.verdict),
                seconds=seconds,
                passed=passed_criteria(entry.traces[1], planted.trace),
            )
        )
        report(len(scores), scores[-1], str(comparison))
    return scores


def _is_named(defect: Defect, parameters: Sequence[str], sources: set[str]) -> bool:
    """Whether the repair names a parameter with wrong values, or is a missing step with its source."""
    if defect.repair is None:
        return False
    if defect.repair.parameter:
        return defect.repair.parameter in parameters
    return any(defect.repair.text.endswith(f" {source}") for source in sources)
