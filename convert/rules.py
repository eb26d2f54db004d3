"""Rules between two ways of naming and laying out the same arrays, and what applies them.

A rule is written once, from ours to theirs; its inverse is derived. Ours are the names of `flax_transformer`:
`encoder.layers.0.self_attention.q_proj.kernel`, kernels (in, out).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..configs.errors import ConversionError

Arrays = Sequence[np.ndarray]
_SHOWN = 30  # of what is wrong


class Spec(NamedTuple):
    """What an array must be."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Transform:
    """Two functions, each the other's inverse, between the arrays on the two sides of a rule."""

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
    """These arrays of the source are those of the target, after the transform."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    transform: Transform = IDENTITY

    @property
    def inverse(self) -> "Rule":
        """The rule that leads back."""
        return Rule(self.target, self.source, Transform(self.transform.backward, self.transform.forward))


def translate(rules: Iterable[Rule], arrays: Mapping[str, np.ndarray], specs: Mapping[str, Spec]) -> dict[str, Any]:
    """The target's arrays, by the rules; `specs` says what every array of the source must be.

    Raises:
        ConversionError: lists all arrays that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    problems = [f"missing: {name}, {_text(spec)}" for name, spec in specs.items() if name not in arrays]
    problems += [f"not in the model: {name}, {_text(_spec(a))}" for name, a in arrays.items() if name not in specs]
    problems += [
        f"wrong: {name} is {_text(_spec(arrays[name]))}, must be {_text(spec)}"
        for name, spec in specs.items()
        if name in arrays and _spec(arrays[name]) != spec
    ]
    if problems:
        shown = problems[:_SHOWN] + [f"… and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        raise ConversionError(f"{len(problems)} arrays do not fit the model:\n  " + "\n  ".join(shown))
    translated = {}
    for rule in rules:
        results = rule.transform.forward([arrays[name] for name in rule.source])
        translated.update(zip(rule.target, results, strict=True))
    return translated


def target_specs(rules: Iterable[Rule], specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """What the rules make of source arrays of these specs."""
    targets = {}
    for rule in rules:
        empty = [np.broadcast_to(np.int8(0), specs[name].shape) for name in rule.source]
        for name, array in zip(rule.target, rule.transform.forward(empty), strict=True):
            targets[name] = Spec(array.shape, specs[rule.source[0]].dtype)
    return targets


class Translation(NamedTuple):
    """Rules in both directions, and what the arrays of either side must be."""

    rules: Sequence[Rule]
    specs: Mapping[str, Spec]
    inverses: Sequence[Rule]
    target_specs: Mapping[str, Spec]

    @classmethod
    def of(cls, rules: Sequence[Rule], specs: Mapping[str, Spec]) -> "Translation":
        """From the rules and the specs of their source."""
        return cls(rules, specs, [rule.inverse for rule in rules], target_specs(rules, specs))


def _spec(array: np.ndarray) -> Spec:
    return Spec(tuple(array.shape), str(array.dtype))


def _text(spec: Spec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
