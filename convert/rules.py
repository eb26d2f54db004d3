"""Conversion rules between two layouts of the same arrays.

A rule maps arrays of `flax_transformer` to those of another layout; its inverse is derived. Flax names look like
`encoder.layers.0.self_attention.q_proj.kernel`, with kernels (in, out).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend.errors import ConversionError
from .arrays.lazy import LazyArrays, Spec, specs_of

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Transform:
    """A function from a rule's source arrays to its target arrays, and its inverse."""

    forward: Callable[[Arrays], Arrays]
    backward: Callable[[Arrays], Arrays]


IDENTITY = Transform(lambda arrays: arrays, lambda arrays: arrays)
TRANSPOSE = Transform(lambda arrays: [a.T for a in arrays], lambda arrays: [a.T for a in arrays])
# q, k and v kernels (in, out) <-> one matrix (3 · out, in), as torch.nn.MultiheadAttention packs them; biases likewise
PACK_QKV = Transform(
    lambda arrays: [np.concatenate([a.T for a in arrays])], lambda arrays: [a.T for a in np.split(arrays[0], 3)]
)


@dataclass(frozen=True)
class Rule:
    """A rule: the transform turns the source arrays into the target arrays."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    transform: Transform = IDENTITY

    @property
    def inverse(self) -> "Rule":
        """The rule from target to source."""
        return Rule(self.target, self.source, Transform(self.transform.backward, self.transform.forward))


def translate(rules: Iterable[Rule], arrays: Mapping[str, np.ndarray], specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Apply the rules to source arrays that must match `specs`; return the target arrays by name.

    Raises:
        ConversionError: lists all arrays that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    _check(arrays, specs)
    targets = {}
    for rule in rules:
        results = rule.transform.forward([arrays[name] for name in rule.source])
        targets.update(zip(rule.target, results, strict=True))
    return targets


def translate_lazily(rules: Iterable[Rule], arrays: Mapping[str, np.ndarray], specs: Mapping[str, Spec]) -> LazyArrays:
    """As `translate`, but a rule is applied whenever one of its target arrays is read. Raises: ConversionError."""
    _check(arrays, specs)
    rules = list(rules)
    places = {name: (rule, i) for rule in rules for i, name in enumerate(rule.target)}

    def compute(name: str) -> np.ndarray:
        rule, i = places[name]
        return rule.transform.forward([arrays[source] for source in rule.source])[i]

    return LazyArrays(target_specs(rules, specs), compute)


def _check(arrays: Mapping[str, np.ndarray], specs: Mapping[str, Spec]) -> None:
    """Raises: ConversionError, lists all arrays that are missing, unknown, of a wrong shape or of a wrong dtype."""
    actual = specs_of(arrays)
    problems = [f"missing: {name}, {text_of(spec)}" for name, spec in specs.items() if name not in actual]
    problems += [f"not in the model: {name}, {text_of(spec)}" for name, spec in actual.items() if name not in specs]
    problems += [
        f"wrong: {name} is {text_of(actual[name])}, must be {text_of(spec)}"
        for name, spec in specs.items()
        if name in actual and actual[name] != spec
    ]
    if problems:
        raise ConversionError(f"{len(problems)} arrays do not fit the model:\n  " + "\n  ".join(problems))


def target_specs(rules: Iterable[Rule], specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """The specs of the target arrays, for source arrays of these specs."""
    targets = {}
    for rule in rules:
        empty = [np.broadcast_to(np.int8(0), specs[name].shape) for name in rule.source]
        for name, array in zip(rule.target, rule.transform.forward(empty), strict=True):
            targets[name] = Spec(array.shape, specs[rule.source[0]].dtype)
    return targets


class Translation(NamedTuple):
    """Rules in both directions, with the specs of both sides."""

    rules: Sequence[Rule]
    specs: Mapping[str, Spec]
    inverses: Sequence[Rule]
    target_specs: Mapping[str, Spec]

    @classmethod
    def of(cls, rules: Sequence[Rule], specs: Mapping[str, Spec]) -> "Translation":
        """The translation of these rules and the specs of their source arrays."""
        return cls(rules, specs, [rule.inverse for rule in rules], target_specs(rules, specs))


def text_of(spec: Spec) -> str:
    """Dtype and shape: float32[31, 12]."""
    return f"{spec.dtype}{list(spec.shape)}"
