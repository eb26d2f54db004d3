"""Pairs parameters and buffers after an update, which are outputs that the two models name differently."""

import numpy as np

from ..capture.trace import Trace

Pair = tuple[str, str]  # names of an output of the reference, and of the candidate
_NUMBERS = 4096  # of a value that are compared


def state_pairs(reference: Trace, candidate: Trace) -> list[Pair]:
    """Outputs that are parameters or buffers of either model after an update, each with the closest one of its size."""
    states = [updated(trace) for trace in (reference, candidate)]
    if reference.outputs.keys() == candidate.outputs.keys() or not any(states):
        return []
    sides = [
        [
            (name, t.values[i].size, *_numbers(t.values[i]))
            for name, i in t.outputs.items()
            if t.values[i].dtype.kind == "f"
        ]
        for t in (reference, candidate)
    ]
    distances = sorted(
        (_distance(one, other), i, j)
        for i, (name, size, *one) in enumerate(sides[0])
        for j, (other_name, other_size, *other) in enumerate(sides[1])
        if size == other_size and (name in states[0] or other_name in states[1])
    )
    pairs: dict[str, str] = {}
    for _, i, j in distances:
        name, other = sides[0][i][0], sides[1][j][0]
        if name not in pairs and other not in pairs.values():
            pairs[name] = other
    return [(name, pairs[name]) for name, *_ in sides[0] if name in pairs]


def _numbers(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some of its numbers in order of size, and some in their own order, less their mean."""
    step = -(-value.size // _NUMBERS) or 1
    flat = np.ravel(value)[::step]
    return np.sort(value, axis=None)[::step], flat - (flat.mean() if flat.size else 0.0)


def _distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """How far the ordered numbers are apart, or how far both are from the same but for a factor and a constant."""
    apart = np.abs(one[0] - other[0]).max(initial=0) / max(np.abs(one[0]).max(initial=0), 1e-300)
    lengths = np.linalg.norm(one[1]) * np.linalg.norm(other[1])
    angle = 1 - abs(one[1] @ other[1]) / lengths if lengths else np.inf
    return float(np.nan_to_num(min(apart, angle), nan=np.inf))


def updated(trace: Trace) -> set[str]:
    """The outputs that are named like parameters, as they are or within a tuple or a mapping."""
    names = {name for name in trace.parameters if not name.isdigit()}
    parts = ((name, name.split(".")) for name in trace.outputs)
    return {n for n, p in parts if any(".".join(p[i:]) in names for i in range(len(p)))}
