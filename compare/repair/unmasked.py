"""A softmax over elements that the reference masks, or that it does not have, such as empty places of a cache."""

from functools import partial

import numpy as np

from ..matching.matching import EXACT, same_order, signature
from .edits import Repair, Sides
from .repairs import MISSING
from .state import State, Step

Array = np.ndarray
_MASKED = -1e4  # a score from which on an element is masked
_SOFTMAXES = ("aten._softmax", "aten._safe_softmax", "reduce_max")
_WINDOW = 60  # operations after the scores in which a value matches if nothing else differs


def unmasked(state: State) -> tuple[Step, Repair, dict[int, Array]] | None:
    """The first softmax before which a mask is missing: the step up to a value that then matches, the repair."""
    suspects = set(state.suspects[1])
    sources = list(dict.fromkeys(o.inputs[0] for o in state.reference.trace.operations if o.name in _SOFTMAXES))
    for softmax in state.candidate.trace.operations:
        if softmax.name not in _SOFTMAXES or suspects.isdisjoint(softmax.outputs):
            continue
        number = softmax.inputs[0]
        for source in sources:
            changes = _masked(source, number, (state.reference, state.candidate))
            if changes:
                repair = Repair(number, f"{MISSING}mask", softmax, edits=((number, partial(_masked, source, number)),))
                step = _step_after(state, changes)
                if step is not None:
                    return step, repair, changes
    return None


def _step_after(state: State, changes: dict[int, Array]) -> Step | None:
    """The step up to the first value that follows from changes and that the reference has."""
    for other, value in state.candidate.replay(changes, limit=_WINDOW).items():
        one = signature(value) if other not in changes else None
        partners = [] if one is None else [*state.reference.partners(one, value, state.bound)]
        if partners:
            return Step(partners[0], other, value, gain=0, closes=state.closed_by(state.candidate.replay(changes)))
    return None


def _masked(source: int, number: int, sides: Sides) -> dict[int, Array]:
    """The candidate's scores, -inf where the reference masks them or has none; nothing if this is no mask."""
    scores, other = sides[1].value(number), sides[0].value(source)
    if not scores.size or not other.size or scores.ndim == 0 or other.ndim == 0:
        return {}
    length = other.shape[-1]
    missing = scores.shape[-1] - length
    if missing < 0 or scores.size * length != other.size * scores.shape[-1]:
        return {}
    rows = other.reshape(-1, length)
    first = rows[0] > _MASKED
    if not same_order(rows[0][first], scores.reshape(-1, scores.shape[-1])[0, :length][first], EXACT):
        return {}
    rows = np.pad(rows, ((0, 0), (0, missing)), constant_values=-np.inf).reshape(scores.shape)
    hidden = rows <= _MASKED
    is_mask = not hidden.all(-1).any() and bool((scores[hidden] > _MASKED).any())
    is_mask = is_mask and same_order(rows[~hidden], scores[~hidden], EXACT)
    return {number: np.where(hidden, -np.inf, scores)} if is_mask else {}
