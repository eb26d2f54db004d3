"""Infers which parameter of a candidate comes from which of a reference, and how it is arranged, without any values.

Both models were initialized independently, and their names are not used. Every learned parameter of both gets random
values; where an operation of the candidate then computes a value of the reference, its parameters are found.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import prod
from time import process_time
from typing import Any

import numpy as np

from ..capture.models import capture
from ..capture.trace import Trace
from ..matching.arrangements import Layout, find_layout
from ..matching.matching import ROUNDED, Side, signature
from ..matching.weights import Match, Part, WeightMap, match_weights
from .assumptions import assume
from .blocks import Block, elements
from .guesses import Guess, layouts
from .rules import apply_rules, converter_code, rule_lines, rules_text
from .search import ParameterSearch

Array = np.ndarray
_FEW = 8  # sources that a question names
_SECONDS = 60.0  # of processor time, in which parameters are searched for
_RUNS = 100  # times that both models could run, if that takes longer
_MOST_SECONDS = 600.0  # whatever they take


@dataclass(frozen=True)
class Inference:
    """The result: the map, and what must be specified by hand."""

    weights: WeightMap
    fixed: tuple[str, ...] = ()  # parameters of the candidate that keep their values: tables, masks, counters
    guessed: tuple[str, ...] = ()  # matches without evidence from values: nothing else has their size
    assumed: Mapping[str, Match] = field(default_factory=dict)  # by shape, order of use and name: to be checked
    questions: Mapping[str, str] = field(default_factory=dict)  # undecided parameter -> the line of a rules file
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the candidate's parameters
    source_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the reference's
    reason: str = ""  # why the search ended early

    @property
    def share(self) -> float:
        """Share of the candidate's parameters, apart from fixed ones, that are decided."""
        count = len(self.shapes) - len(self.fixed)
        return len(self.weights.matches) / count if count else 1.0

    @property
    def matches(self) -> dict[str, Match]:
        """All matches: those that values identify, and those that are assumed."""
        return {**self.weights.matches, **self.assumed}

    @property
    def assumptions(self) -> list[str]:
        """The assumed matches, as lines of a rules file."""
        return rule_lines(self.assumed, self.source_shapes)

    def rules(self) -> str:
        """The text of a rules file, which `read_rules` reads."""
        found = rule_lines(self.weights.matches, self.source_shapes)
        return rules_text(found, self.assumptions, list(self.questions.values()))

    def converter(self) -> str:
        """Python code of a converter in both directions."""
        return converter_code(self.matches, self.source_shapes, self.shapes)


def infer_weights(
    reference: Any,
    candidate: Any,
    inputs: Sequence[Any],
    candidate_inputs: Sequence[Any] | None = None,
    given: Mapping[str, Match] | None = None,
    progress: Callable[[int, int], None] = lambda decided, count: None,
) -> Inference:
    """Infer where each of the candidate's parameters comes from; models and inputs are those that `diagnose` takes.

    given: matches that are known, such as those of `read_rules`; they are taken as they are.
    progress: called with the number of decided parameters, or parts of them, and the number of all.

    Raises:
        CaptureError: a model cannot be traced.
    """
    others = inputs if candidate_inputs is None else candidate_inputs
    return _inferred(capture(reference, inputs), capture(candidate, others), given or {}, progress)


def _inferred(
    reference: Trace, candidate: Trace, given: Mapping[str, Match], progress: Callable[[int, int], None]
) -> Inference:
    """The same from traces of both models, of the same inputs."""
    arrays = [{name: t.values.kept(n) for name, n in t.parameters.items()} for t in (reference, candidate)]
    learned = learned_parameters(reference, candidate), learned_parameters(candidate, reference)
    fixed = [{n: a for n, a in side.items() if n not in own} for side, own in zip(arrays, learned, strict=True)]
    known = {**match_weights(*fixed).matches, **given}
    start = process_time()
    random = randomized(reference, learned[0], 0), randomized(candidate, learned[1], 1)
    run = process_time() - start  # each computes all values once
    random = random[0], _with_rules(*random, given)
    undecided = [name for name in learned[1] if name not in known]
    search = ParameterSearch(*random, (learned[0], undecided))
    search.take(part for match in given.values() for part in _with_sums(match))
    search.run(max(_SECONDS, min(_RUNS * run, _MOST_SECONDS)), progress)
    return _Assembly(search, arrays, undecided).inference(known)


def learned_parameters(trace: Trace, other: Trace) -> tuple[str, ...]:
    """Names of the parameters that training changes.

    Both models were initialized separately. A parameter whose values the other model has too, as a parameter or as a
    result of constants, is therefore a table, such as sinusoidal positions. Masks and counters have few different
    numbers, infinities, or integers. Constants count as learned: biases of 0 and gains of 1, but also running
    statistics, which a converter copies too.
    """
    side = Side(other)
    names = []
    parts = _parts_of_parameters(trace)
    for name, number in trace.parameters.items():
        value = trace.values[number]
        if value.dtype.kind != "f" or not np.isfinite(value).all() or not value.size:
            continue
        constant = bool((value == value.flat[0]).all())
        known = any(_occurs(trace.values[part], side) for part in (number, *parts.get(number, ())))
        if constant or value.size < 4 or (signature(value) is not None and not known):
            names.append(name)
    return tuple(names)


def _occurs(value: Array, side: Side) -> bool:
    one = signature(value)
    return one is not None and next(side.partners(one, value, ROUNDED), None) is not None


def _parts_of_parameters(trace: Trace) -> dict[int, list[int]]:
    """Parameter -> values that are computed from it and from indices alone, such as the first rows of a table."""
    origin = {number: number for number in trace.parameters.values()}
    parts: dict[int, list[int]] = {}
    for operation in trace.operations:
        floating = [n for n in operation.inputs if trace.values[n].dtype.kind == "f"]
        if len(floating) == 1 and floating[0] in origin:
            source = origin[floating[0]]
            for number in operation.outputs:
                origin[number] = source
                parts.setdefault(source, []).append(number)
    return parts


def randomized(trace: Trace, names: Sequence[str], seed: int) -> Trace:
    """The trace with random numbers as these parameters; those that were positive, such as variances, stay positive.

    Parameters with equal contents, apart from constants, stay equal: they may be tied.
    """
    random = np.random.default_rng(seed)
    changes: dict[int, Array] = {}
    equal: dict[bytes, Array] = {}
    for name in names:
        number = trace.parameters[name]
        value = trace.values[number]
        if value.size and value.min() > 0:
            new = random.uniform(0.5, 1.5, value.shape)
        else:
            scale = 0.5 if value.ndim < 2 else 1.5 * value.size**-0.25
            new = scale * random.standard_normal(value.shape)
        constant = (value == value.flat[0]).all()
        key = str(number).encode() if constant else str(value.shape).encode() + value.tobytes()
        changes[number] = equal.setdefault(key, new)
    result = copy(trace)
    values = trace.replay(changes)
    result.values = trace.values.with_changes(values)
    return result


def _with_sums(match: Match) -> list[Part]:
    """A match's parts, those that are added included."""
    return [*match.parts, *(replace(part, source=match.added_to) for part in match.parts if match.added_to)]


def _with_rules(reference: Trace, candidate: Trace, given: Mapping[str, Match]) -> Trace:
    """The candidate with the reference's numbers for these parameters."""
    state = {name: reference.values[number] for name, number in reference.parameters.items()}
    shapes = {name: candidate.values[number].shape for name, number in candidate.parameters.items()}
    arrays = apply_rules(given, state, shapes)
    changed = candidate.replay({candidate.parameters[name]: array for name, array in arrays.items()})
    result = copy(candidate)
    result.values = candidate.values.with_changes(changed)
    return result


class _Assembly:
    """Puts blocks together to matches of whole parameters."""

    def __init__(self, search: ParameterSearch, arrays: Sequence[Mapping[str, Array]], learned: Sequence[str]):
        self.search = search
        self.learned = learned
        self.source_shapes = {name: array.shape for name, array in arrays[0].items()}
        self.shapes = {name: array.shape for name, array in arrays[1].items()}
        trace = search.candidate
        self.names = {n: name for name, n in reversed(trace.parameters.items())}  # number -> its first name
        self.numbers = trace.parameters

    def inference(self, known: Mapping[str, Match]) -> Inference:
        """The result; `known`: the matches that were not searched for."""
        guessed = self._exclude()
        matches = {name: match for name in self.learned if (match := self._match(name)) is not None}
        open_names = [name for name in self.learned if name not in matches]
        ambiguous = {name: self._choices(name) for name in open_names}
        fixed = tuple(name for name in self.shapes if name not in self.learned and name not in known)
        unused = {b.name for key, b in self.search.sources.items() if self.search.unused[key].all()}
        weights = WeightMap(
            {**matches, **known},
            {name: choices for name, choices in ambiguous.items() if choices},
            tuple(name for name, choices in ambiguous.items() if not choices),
            tuple(sorted(unused)),
            {},
        )
        assumed = self._assumed(sorted(unused), open_names)
        questions = {name: question(name, choices) for name, choices in ambiguous.items() if name not in assumed}
        shapes = self.shapes, self.source_shapes
        return Inference(weights, fixed, tuple(guessed), assumed, questions, *shapes, self.search.reason)

    def _assumed(self, unused: Sequence[str], open_names: Sequence[str]) -> dict[str, Match]:
        """Matches, by assumption, of the parameters of which nothing is decided."""
        search = self.search
        touched = {block.name for block, _ in search.decided.values()}
        options = [guess for group in search.groups for choice in group for guess in choice.values()]
        known = [guess.layout for guess in (*(guess for _, guess in search.decided.values()), *options) if guess.source]
        undecided = [name for name in open_names if self.names[self.numbers[name]] not in touched]
        return assume(search.reference.trace, search.candidate, unused, undecided, known)

    def _exclude(self) -> list[str]:
        """Decide blocks for which one free source and one arrangement is left; names of their parameters."""
        names = []
        for key, block in list(self.search.open.items()):
            fitting = [
                Guess(source, layout)
                for source, array in self.search.arrays.items()
                if self.search.unused[source].all() and array.size == prod(block.shape)
                for tier, layout, _ in layouts(array.shape, block.shape)
                if tier == 0
            ]
            rivals = [k for k, other in self.search.open.items() if prod(other.shape) == prod(block.shape)]
            if len(fitting) == 1 and rivals == [key]:  # else it may be decided by now, with another one
                self.search.decide({key: fitting[0]})
                names.append(block.name)
        return names

    def _match(self, name: str) -> Match | None:
        """The match of a parameter all of whose blocks are decided."""
        first = self.names[self.numbers[name]]
        own = [entry for entry in self.search.decided.values() if entry[0].name == first]
        shape = self.shapes[name]
        if own and all(not guess.source for _, guess in own):
            return Match(name, (), padding=0.0)
        covered = sum(prod(block.shape) for block, _ in own)
        parts = tuple(self._part(block, guess) for block, guess in own if guess.source)
        kinds = {(guess.shift, self._name(guess.added_to)) for _, guess in own if guess.source}
        if not own or len(kinds) > 1:
            return None
        if covered < prod(shape):
            parts = _extended(parts, shape)
            if not parts:
                return None
        shift, added = kinds.pop()
        padding = 0.0 if any(guess.padding or not guess.source for _, guess in own) else None
        whole = _extended(parts, shape) if len(parts) > 1 and padding is None else ()
        return Match(name, whole or parts, shift, added, padding)

    def _name(self, source: str) -> str:
        return self.search.sources[source].name if source else ""

    def _part(self, block: Block, guess: Guess) -> Part:
        """The region of the parameter, and the layout of the whole source."""
        rows = tuple(slice(i, i + 1) for i in block.row)
        inner = guess.region(block.shape)
        region = tuple(
            slice(outer.start + part.start, outer.start + part.stop)
            for outer, part in zip(block.region, inner, strict=True)
        )
        source = self.search.sources[guess.source]
        sizes = self.source_shapes[source.name]
        start = source.start(sizes)
        layout = guess.layout
        shape = (*(1 for _ in rows), *layout.shape)
        return Part((*rows, *region), source.name, Layout(start + layout.start, layout.axes, shape, prod(sizes)))

    def _choices(self, name: str) -> tuple[str, ...]:
        """Possible sources of an undecided parameter: those that are left, or unused ones of a fitting size."""
        search, first = self.search, self.names[self.numbers[name]]
        keys = {key for key, block in search.open.items() if block.name == first}
        left = [self._name(g[k].source) for group in search.groups for g in group for k in keys & g.keys()]
        size = prod(self.shapes[name])
        fitting = [b.name for key, b in search.sources.items() if search.unused[key].any()]
        fitting = [source for source in fitting if prod(self.source_shapes[source]) == size]
        return tuple(dict.fromkeys(left or fitting))


def _extended(parts: tuple[Part, ...], shape: tuple[int, ...]) -> tuple[Part, ...]:
    """The one part of which these are regions; none if there is none."""
    if len({part.source for part in parts}) != 1:
        return ()
    index = np.full(shape, -1)
    for part in parts:
        index[part.region] = elements(part.layout).reshape(part.layout.shape)
    size = parts[0].layout.source_size
    layout = find_layout(index, size) if index.size <= size else None
    if layout is None or len(np.unique(elements(layout))) < index.size:
        return ()
    return (Part(tuple(slice(0, n) for n in shape), parts[0].source, layout),)


def question(name: str, choices: Sequence[str]) -> str:
    """The line that a rules file needs for an undecided parameter."""
    named = " or ".join(f'"{choice}"' for choice in choices[:_FEW]) or "which parameter of the reference?"
    more = f" or {len(choices) - _FEW} more" if len(choices) > _FEW else ""
    return f'"{name}" = {{ source = {named}{more} }}'
