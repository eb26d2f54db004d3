"""`twinax compare`: loads two models from Python files, compares them and reports where they diverge."""

import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...compare.capture.factories import called, factory_of, function_of, import_path, inputs_of, needs_parameters
from ...compare.capture.models import is_torch
from ...compare.capture.parameters import arrays_of
from ...compare.capture.recording import SUFFIX, Recording
from ...compare.capture.recording_file import read_recording
from ...compare.capture.trace import CaptureError
from ...compare.comparison import Comparison, Convert, compare
from ...compare.matching.weights import match_weights
from ...compare.page import page
from ...compare.report import as_document, show
from ...compare.testing import annotations, on_github
from ...compare.weight_map.inference import infer_weights
from ...compare.weight_map.rules import apply_rules, read_rules
from ...train.tracking.progress import progress_bar
from ..flags.proofs import Compare
from ..usage import UsageError, check_outputs, check_report, write_json, write_text

_NAMED = 3  # parameters that a line names
_RATE = 1e-3  # learning rate where an optimizer is only named
_EXIT = {"equal": 0, "equal but for float32 constants": 0, "undecided": 2, "gradients undecided": 2}


@import_path()
def run(flags: Compare) -> int:
    """Compare the models that two factories return, or that were recorded; the exit status."""
    sources = (flags.reference, flags.candidate, flags.inputs, flags.candidate_inputs, flags.convert)
    files = [name.rpartition(".py:")[0] + ".py" if ".py:" in name else name for name in filter(None, sources)]
    check_report(flags.report)
    _check_rules(flags.convert, flags.rules, flags.write_rules)
    code = str(Path(flags.write_rules).with_suffix(".py")) if flags.write_rules is not None else None
    check_outputs([flags.json_file, flags.report, flags.write_rules, code], [*files, flags.rules])
    try:
        comparison = _compared(flags)
    except CaptureError as error:
        raise UsageError(str(error)) from None
    except TypeError as error:
        if "is not an optimizer" not in str(error):
            raise
        raise UsageError(str(error)) from None
    show(comparison, (flags.reference, flags.candidate))
    root = on_github()
    for line in annotations(comparison, root) if root is not None else ():
        print(line)
    if flags.json_file is not None:
        write_json(flags.json_file, as_document(comparison))
    if flags.report is not None:
        write_text(flags.report, page(comparison, (flags.reference, flags.candidate)))
    return _EXIT.get(comparison.verdict, 1)


def _compared(flags: Compare) -> Comparison:
    reference, candidate = (_recording(name, flags.gradients) for name in (flags.reference, flags.candidate))
    reference_inputs, candidate_inputs = _both_inputs(flags, reference, candidate)
    recorded = next((side.file for side in (reference, candidate) if side is not None), None)
    if recorded is not None and flags.layers is not None:
        raise UsageError(f"--layers {flags.layers}: {recorded} has its layers; pass the flag to twinax capture")
    model = reference or called(flags.reference, factory_of(flags.reference, flags.layers))
    factory = factory_of(flags.candidate, flags.layers) if candidate is None else None
    wants_weights = factory is not None and needs_parameters(factory)
    arguments = (arrays_of(model),) if wants_weights else ()
    port = called(flags.candidate, factory, arguments) if factory is not None else candidate
    optimizers = _optimizers(flags.optimizer) if flags.optimizer else None
    converter = function_of(flags.convert) if flags.convert is not None else _rules_converter(flags.rules, model, port)
    assumed, seconds = "", {}
    if converter is None and _are_different(model, port):
        start = time.perf_counter()
        both_inputs = reference_inputs, candidate_inputs
        converter, assumed = _inferred_converter(model, port, *both_inputs, flags.write_rules)
        seconds["weights"] = time.perf_counter() - start
    if converter is None and factory is not None and wants_weights:
        converter = partial(_built_parameters, factory, (*arguments, port))
    comparison = compare(
        *(model, port, reference_inputs, candidate_inputs),
        convert=converter,
        gradients=flags.gradients,
        optimizers=optimizers,
        dropout=flags.dropout,
        rounding=not flags.no_rounding,
    )
    comparison = replace(comparison, seconds={**seconds, **comparison.seconds})
    if assumed and not (comparison.ok or comparison.forward.verified):  # equal outputs would prove them
        return replace(comparison, coverage_gaps=(*comparison.coverage_gaps, assumed))
    return comparison


def _recording(name: str, gradients: bool) -> Recording | None:
    """What a file of `twinax capture` holds; None of a function. It is printed where the model ran."""
    if not name.endswith(SUFFIX):
        return None
    recording = read_recording(name)
    if gradients:
        recording.check_gradients()
    about = dict(recording.about)
    versions = ", ".join(f"{package} {version}" for package, version in about.items() if package != "model")
    print(f"{name}: {about.get('model', 'a model')}, recorded with {versions}")
    return recording


def _both_inputs(flags: Compare, reference: Recording | None, candidate: Recording | None) -> tuple[Any, Any]:
    """The inputs of both sides; a recording has its own."""
    for recording, flag, value in (
        (reference, "inputs", flags.inputs),
        (candidate, "candidate-inputs", flags.candidate_inputs),
    ):
        if recording is not None and value is not None:
            raise UsageError(f"--{flag} {value}: {recording.file} has its own inputs; omit the flag")
    first = reference or candidate
    if flags.inputs is None and first is None:
        raise UsageError("--inputs: is missing; pass an .npz or .npy file, or file.py:function")
    own = first.inputs if flags.inputs is None and first is not None else inputs_of(str(flags.inputs))
    if candidate is not None:
        return own, candidate.inputs
    return own, own if flags.candidate_inputs is None else inputs_of(flags.candidate_inputs)


def _built_parameters(
    factory: Callable[..., Any], built: tuple[Any, ...], state: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The parameters of the port that a factory builds from the reference's: it is a converter too.

    `built`: parameters from which a port was built already, and that port.
    """
    first, port = built
    is_same = first.keys() == state.keys() and all(np.may_share_memory(first[n], state[n]) for n in first)
    return arrays_of(port if is_same else factory(state))


def _check_rules(convert: str | None, rules: str | None, write_rules: str | None) -> None:
    if convert is not None and rules is not None:
        raise UsageError(f"--rules {rules}: cannot be combined with --convert")
    if write_rules is None:
        return
    if Path(write_rules).suffix != ".toml":
        raise UsageError(f"--write-rules {write_rules}: must end in .toml")
    for path in (Path(write_rules), Path(write_rules).with_suffix(".py")):
        if path.exists():
            raise UsageError(f"--write-rules {path}: exists; pass another name")


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays_of(model).items()}


def _rules_converter(rules: str | None, model: Any, port: Any) -> Convert | None:
    """The converter that a rules file describes."""
    if rules is None:
        return None
    shapes = _shapes(port)
    matches = read_rules(rules, _shapes(model), shapes)
    return lambda state: apply_rules(matches, state, shapes)


def _are_different(model: Any, port: Any) -> bool:
    """Whether most parameters of the port have other values than the reference's, as without a converter."""
    weights = match_weights(arrays_of(model), arrays_of(port))
    count = len(weights.matches) + len(weights.ambiguous) + len(weights.unmatched)
    return 2 * len(weights.unmatched) > count


def _inferred_converter(
    model: Any, port: Any, reference_inputs: Any, candidate_inputs: Any, write_rules: str | None
) -> tuple[Convert, str]:
    """(the converter that is inferred from both models, what it assumes); its rules are written if asked for."""
    for side in (model, port):
        if isinstance(side, Recording) and side.gaps():
            raise CaptureError(f"{side.gaps()[0]}, and no weights can be inferred; pass --convert or --rules")
    print("the candidate has other weights: inferring which parameter is which", file=sys.stderr)
    if is_torch(port) and not (is_torch(model) or isinstance(model, Recording)):
        print("the candidate is the PyTorch model; if the JAX model is the port, exchange the two", file=sys.stderr)
    with progress_bar() as progress:
        show_progress = partial(progress, "parts of parameters inferred")
        inference = infer_weights(model, port, reference_inputs, candidate_inputs, progress=show_progress)
    matches, shapes = inference.matches, _shapes(port)
    learned = len(shapes) - len(inference.fixed)
    print(f"weights: {len(inference.weights.matches)} of {learned} parameters inferred, without their names")
    if inference.reason:
        print(f"weights: {inference.reason}; in models of fewer layers there is less to search for")
    names, assumed = list(inference.assumed), ""
    if names:
        first = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        assumed = f"weights assumed from shapes, order of use and names (--write-rules lists them): {first}"
        print(assumed)
    for line in inference.questions.values():
        print(f"undecided: {line}")
    if write_rules is not None:
        code = Path(write_rules).with_suffix(".py")
        Path(write_rules).write_text(inference.rules())
        code.write_text(inference.converter())
        print(f"weights: rules in {write_rules}, and a converter both ways in {code}")
    return lambda state: apply_rules(matches, state, shapes), assumed


def _optimizers(names: tuple[str, ...]) -> tuple[Any, Any]:
    """(a torch factory, an optax transformation) for a name; else what two functions return."""
    if len(names) == 1 and ":" not in names[0]:
        import optax
        import torch

        kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
        if names[0] not in kinds or not hasattr(optax, names[0]):
            common = ", ".join(sorted(name for name in kinds if hasattr(optax, name)))
            raise UsageError(
                f"--optimizer {names[0]}: must be {common}, or two functions, as in ref.py:opt port.py:opt"
            )
        torch_class: Any = kinds[names[0]]
        return lambda pairs: torch_class(pairs, lr=_RATE), getattr(optax, names[0])(_RATE)
    if len(names) != 2:
        raise UsageError(f"--optimizer {' '.join(names)}: must be a name, such as adamw, or two functions")
    one, other = (_optimizer(name) for name in names)
    return one, other


def _optimizer(name: str) -> Any:
    """A function that makes torch optimizers as it is, and what any other returns."""
    function = function_of(name)
    return function if inspect.signature(function).parameters else called(name, function, ())
