"""Defects in gradients alone: planted in the candidates of pairs, diagnosed, and compared with other criteria."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.external_pairs.backward import GradientSite, gradient_sites
from benchmarks.external_pairs.forward import Checked
from benchmarks.external_pairs.scores import Score, by_operator, report, sample
from twinax.compare.capture.models import capture
from twinax.compare.capture.trace import CaptureError, Trace
from twinax.compare.repair.diagnosis import Diagnosis
from twinax.compare.training.gradients import cotangents, diagnose_gradients

Array = np.ndarray
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5)
CRITERIA = ("outputs equal", *(f"gradients atol {t:.0e}" for t in TOLERANCES), "gradient norms 1%", "cosine 0.999")
_SAME = 1e-9  # outputs must not change by more
_EFFECT = 1e-6  # a parameter's gradient changes by more, relative to the largest of all gradients
_SLOW = "float32"  # a diagnosis of gradients beside rounded constants takes a minute


@dataclass(frozen=True)
class _Planting:
    """A site, and the trace of the model that has the defect."""

    site: GradientSite
    plant: Callable[[], Trace | None]


def measure(checked: Mapping[str, Checked], seed: int, count: int) -> list[Score]:
    """The score of each sampled defect."""
    checked = {name: entry for name, entry in checked.items() if _SLOW not in name}
    gradients = {name: _correct(entry) for name, entry in checked.items()}
    stock = {name: _sites(entry, gradients[name]) for name, entry in checked.items()}
    scores = []
    for name, planting, planted in sample(stock, seed, count):
        site = planting.site
        entry, models = checked[name], (checked[name].pair.reference, site.model())
        assert entry.diagnosis.weights is not None
        assert isinstance(planted, Trace)
        start = time.perf_counter()
        diagnosis = diagnose_gradients(models, entry.inputs, (entry.traces[0], planted), entry.diagnosis)
        seconds = time.perf_counter() - start
        passed = passed_criteria(_gradients(gradients[name]), _gradients(planted))
        scores.append(_score(name, entry, site, diagnosis, seconds, passed))
        report(len(scores), scores[-1], str(diagnosis))
    return scores


def _correct(entry: Checked) -> Trace:
    """The candidate's trace with its gradients, without the defect."""
    return capture(entry.pair.candidate, entry.inputs[1], cotangents(*entry.traces)[1])


def _sites(entry: Checked, correct: Trace) -> dict[str, list[_Planting]]:
    """The sites by operator."""
    sites = gradient_sites(entry.pair.candidate, entry.inputs[1])
    plantings = [_Planting(site, partial(_planted, entry, correct, site)) for site in sites]
    return by_operator(plantings, lambda planting: planting.site.operator)


def _planted(entry: Checked, correct: Trace, site: GradientSite) -> Trace | None:
    """The trace with a defect; None if it changes the outputs, or no gradient."""
    try:
        trace = capture(site.model(), entry.inputs[1], cotangents(*entry.traces)[1])
    except CaptureError:
        return None
    return trace if has_effect(correct, trace) else None


def has_effect(correct: Trace, planted: Trace) -> bool:
    """Whether the outputs are the same and the gradients are not."""
    for name, number in planted.outputs.items():
        one, other = correct.values[correct.outputs[name]], planted.values[number]
        if one.shape != other.shape or np.abs(one - other).max(initial=0) > _SAME * np.abs(one).max(initial=1):
            return False
    one, other = _gradients(correct), _gradients(planted)
    largest = max(float(np.abs(array).max(initial=0)) for array in one.values())
    return any(not (np.abs(array - other[name]) <= _EFFECT * largest).all() for name, array in one.items())


def _gradients(trace: Trace) -> dict[str, Array]:
    return {name: trace.values[number] for name, number in trace.gradients.items()}


def passed_criteria(correct: Mapping[str, Array], planted: Mapping[str, Array]) -> tuple[str, ...]:
    """The criteria that gradients with a defect satisfy; none but the outputs' if a number is NaN."""
    one, other = (np.concatenate([side[name].ravel() for name in correct]) for side in (correct, planted))
    error = float(np.abs(one - other).max())
    norms = [float(np.linalg.norm(side)) for side in (one, other)]
    fulfilled = {f"gradients atol {t:.0e}": error <= t for t in TOLERANCES}
    fulfilled |= {"outputs equal": True, "gradient norms 1%": abs(norms[0] - norms[1]) <= 0.01 * norms[0]}
    fulfilled["cosine 0.999"] = float(one @ other) > 0.999 * norms[0] * norms[1]
    return tuple(criterion for criterion in CRITERIA if fulfilled[criterion])


def _score(
    name: str, entry: Checked, site: GradientSite, diagnosis: Diagnosis, seconds: float, passed: tuple[str, ...]
) -> Score:
    is_first = is_inside = False
    first = next(iter(diagnosis.defects), None)
    weights = entry.diagnosis.weights
    if first is not None and weights is not None:
        matches = [weights.matches[name] for name in site.parameters if name in weights.matches]
        named = first.note.partition(":")[0] if first.note else next(iter(first.lines), "")
        sources = {source for match in matches for source in match.sources}
        is_first = named in {*site.parameters, *sources, site.line} or first.lines[:1] == (site.line,)
        is_inside = is_first or site.line in {operation.line for operation in first.candidate}
    return Score(
        name,
        site.operator,
        site.detail,
        ", ".join(site.parameters) or site.line,
        diagnosis.verdict == "different",
        is_first,
        is_inside,
        first is not None and (first.repair is not None or bool(first.note)),
        len(diagnosis.defects) == 1,
        str(first or diagnosis.verdict),
        seconds,
        passed,
    )
