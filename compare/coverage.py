"""What the inputs of a comparison did not reach: padding, masks, branches and parameters."""

from collections.abc import Iterator, Sequence

import numpy as np

from .capture.trace import Trace
from .matching.regions import SELECTIONS
from .matching.weights import WeightMap

_MOST = 6  # lines that are named


def coverage_gaps(reference: Trace, candidate: Trace, weights: WeightMap) -> list[str]:
    """One sentence per part of the models that these inputs do not test."""
    sentences = [*_lengths(reference)]
    inputs = {name: reference.values[number] for name, number in reference.given.items()}
    zero = [name for name, value in inputs.items() if value.dtype.kind == "f" and value.size and not value.any()]
    sentences += [f"input {name}: is 0 everywhere, so products with it were not tested" for name in zero]
    sentences += [f"{line}: the mask is the same everywhere" for line in _constant_masks(candidate)]
    sentences += [f"{branch} was not taken" for branch in candidate.branches]
    sentences += [note for trace in (reference, candidate) for note in trace.notes]
    sentences += [_unused(name, reference, weights) for name in candidate.unused_parameters()]
    values = {name: candidate.values.kept(number) for name, number in candidate.parameters.items()}
    constant = [name for name, value in values.items() if value.size > 1 and (value == value.flat[0]).all()]
    if constant:
        names = ", ".join(constant[:_MOST]) + (f" and {len(constant) - _MOST} more" if len(constant) > _MOST else "")
        sentences.append(f"all values are equal, so their order was not tested: {names}")
    return [*sentences, *_shared(reference, candidate, weights), *_discrete(reference)]


def _shared(reference: Trace, candidate: Trace, weights: WeightMap) -> Iterator[str]:
    """Parameters with equal values that are separate on one side and one parameter on the other."""
    copies: dict[str, list[str]] = {}  # of each parameter of the reference, the candidate's that are whole copies
    for name, match in weights.matches.items():
        size = candidate.values.kept(candidate.parameters[name]).size
        if len(match.parts) == len(match.sources) == 1 and match.parts[0].layout.source_size == size:
            copies.setdefault(match.sources[0], []).append(name)
    for source, names in copies.items():
        equal = _trained(reference, [source, *weights.ties.get(source, ())]), _trained(candidate, names)
        counts = [len({t.parameters[n] for n in ns}) for t, ns in zip((reference, candidate), equal, strict=True)]
        if min(counts) == 1 < max(counts):
            several, one = ("reference", "candidate") if counts[0] > 1 else ("candidate", "reference")
            listed = " and ".join(equal[0 if counts[0] > 1 else 1][:_MOST])
            yield f"{listed}: separate in the {several}, one parameter in the {one}; equal only while their values are"


def _trained(trace: Trace, names: Sequence[str]) -> list[str]:
    """Those of these parameters that are trained and that an output depends on."""
    unused = {*trace.unused_parameters(), *trace.buffers}
    floating = [n for n in names if trace.values.kind(trace.parameters[n]) in "fc"]
    return [n for n in floating if n not in unused]


def _discrete(trace: Trace) -> Iterator[str]:
    """Outputs of whole numbers or truth values, computed from floating-point numbers that are no outputs."""
    seen = {number for number in trace.outputs.values() if trace.values[number].dtype.kind in "fc"}
    for name, number in trace.outputs.items():
        if trace.values[number].dtype.kind in "biu":
            before = {number}
            for operation in reversed(trace.operations):
                if not before.isdisjoint(operation.outputs):
                    before.update({*operation.inputs} - seen)
            if any(trace.values.kind(n) in "fc" for n in before):
                yield f"output {name}: has no floating-point numbers, so a small difference before it was not tested"


def _unused(name: str, reference: Trace, weights: WeightMap) -> str:
    """What is known of a parameter of the candidate that no output depends on."""
    match = weights.matches.get(name)
    sources = match.sources if match is not None else weights.ambiguous.get(name, ())
    sources = [one for source in sources for one in (source, *weights.ties.get(source, ()))]
    used = [source for source in sources if source in reference.parameters.keys() - {*reference.unused_parameters()}]
    if not used or weights.ties.keys() & set(sources):  # a tied one may be used under another name
        return f"{name}: no output depends on it"
    return f"{name}: the candidate does not use it; the reference uses {used[0]}"


def _lengths(trace: Trace) -> Iterator[str]:
    """Inputs of token ids whose rows all have one length, whether padding stands at their end or at their start."""
    for name, number in trace.given.items():
        value = trace.values[number]
        if value.dtype.kind in "iu" and value.ndim == 2 and value.shape[1] > 1:
            runs = [np.cumprod(side == side[:, :1], 1).sum(1).tolist() for side in (value, value[:, ::-1])]
            if len(value) < 2 or all(len(set(lengths)) == 1 for lengths in runs):
                yield f"input {name}: all rows have the same length, so padding was not tested"


def _constant_masks(trace: Trace) -> list[str]:
    """Lines that select by a mask whose values are all equal, and that no other mask reaches."""
    varied: dict[str, bool] = {}
    for operation in trace.operations:
        floating = [trace.values[n].dtype.kind == "f" for n in operation.outputs]  # others choose indices
        if operation.name in SELECTIONS and all(floating):
            masks = [
                trace.values[n] for n in operation.inputs if trace.values[n].dtype == bool and trace.values[n].ndim
            ]
            for mask in masks:
                place = operation.line or operation.module
                varied[place] = varied.get(place, False) or bool(mask.size and mask.any() and not mask.all())
    return [place for place, varies in varied.items() if not varies][:_MOST]
