"""`twinax compare`: loads two models from Python files, compares them and reports where they diverge."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...compare.capture.trace import CaptureError
from ...compare.comparison import Convert, arrays_of, compare
from ...compare.matching.weights import match_weights
from ...compare.page import page
from ...compare.report import as_document, show
from ...compare.testing import annotations, on_github
from ...compare.weight_map.inference import infer_weights
from ...compare.weight_map.rules import apply_rules, read_rules
from ..flags.proofs import Compare
from ..usage import UsageError, check_outputs, write_json, write_text

_NAMED = 3  # parameters that a line names
_RATE = 1e-3  # learning rate where an optimizer is only named
_EXIT = {"equal": 0, "equal but for float32 constants": 0, "undecided": 2, "gradients undecided": 2}


@contextmanager
def _import_path() -> Iterator[None]:
    """Restore the import path after the folders of the compared files were added."""
    before = [*sys.path]
    try:
        yield
    finally:
        sys.path[:] = before


@_import_path()
def run(flags: Compare) -> int:
    """Compare the models that two factories return; the exit status."""
    sources = (flags.reference, flags.candidate, flags.inputs, flags.candidate_inputs, flags.convert)
    files = [name.rpartition(":")[0] for name in filter(None, sources)]
    _check_report(flags.report)
    _check_rules(flags.convert, flags.rules, flags.write_rules)
    code = str(Path(flags.write_rules).with_suffix(".py")) if flags.write_rules is not None else None
    check_outputs([flags.json_file, flags.report, flags.write_rules, code], [*files, flags.rules])
    reference_inputs = _inputs(flags.inputs)
    candidate_arguments = reference_inputs if flags.candidate_inputs is None else _inputs(flags.candidate_inputs)
    model = _call(flags.reference, _function(flags.reference), ())
    factory = _function(flags.candidate)
    wants_weights = any(p.default is p.empty for p in inspect.signature(factory).parameters.values())
    port = _call(flags.candidate, factory, (arrays_of(model),) if wants_weights else ())
    optimizers = _optimizers(flags.optimizer) if flags.optimizer else None
    try:
        converter = (
            _function(flags.convert) if flags.convert is not None else _rules_converter(flags.rules, model, port)
        )
        assumed = ""
        if converter is None and _are_different(model, port):
            both_inputs = reference_inputs, candidate_arguments
            converter, assumed = _inferred_converter(model, port, *both_inputs, flags.write_rules)
        if converter is None and wants_weights:
            converter = partial(_built_parameters, factory)
        comparison = compare(
            *(model, port, reference_inputs, candidate_arguments),
            convert=converter,
            gradients=flags.gradients,
            optimizers=optimizers,
            dropout=flags.dropout,
            rounding=not flags.no_rounding,
        )
    except (CaptureError, TypeError) as error:
        if isinstance(error, TypeError) and "is not an optimizer" not in str(error):
            raise
        raise UsageError(str(error)) from None
    if assumed and not (comparison.ok or comparison.forward.verified):  # equal outputs would prove them
        comparison = replace(comparison, coverage_gaps=(*comparison.coverage_gaps, assumed))
    show(comparison, (flags.reference, flags.candidate))
    root = on_github()
    for line in annotations(comparison, root) if root is not None else ():
        print(line)
    if flags.json_file is not None:
        write_json(flags.json_file, as_document(comparison))
    if flags.report is not None:
        write_text(flags.report, page(comparison, (flags.reference, flags.candidate)))
    return _EXIT.get(comparison.verdict, 1)


def _built_parameters(factory: Callable[..., Any], state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters of the port that a factory builds from the reference's: it is a converter too."""
    return arrays_of(factory(state))


def _check_report(report: str | None) -> None:
    if report is not None and Path(report).suffix not in (".html", ".htm"):
        raise UsageError(f"--report {report}: must end in .html")


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
    print("the candidate has other weights: inferring which parameter is which", file=sys.stderr)
    inference = infer_weights(model, port, reference_inputs, candidate_inputs)
    matches, shapes = inference.matches, _shapes(port)
    learned = len(shapes) - len(inference.fixed)
    print(f"weights: {len(inference.weights.matches)} of {learned} parameters inferred, without their names")
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
    function = _function(name)
    return function if inspect.signature(function).parameters else _call(name, function, ())


def _function(name: str) -> Callable[..., Any]:
    """The function that `file.py:name` names."""
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UsageError(f"{name}: must name a function in a Python file, as in port.py:make")
    if not os.path.isfile(path):
        raise UsageError(f"{path}: there is no such file")
    module = _module(Path(path))
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"{name}: {path} has no function {attribute}; it has {', '.join(names) or 'none'}")
    return function


def _module(path: Path) -> ModuleType:
    """The module in a file, which can import what lies beside it; two files of one name are two modules."""
    name = f"compared_{abs(hash(path.resolve()))}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        del sys.modules[name]
        raise UsageError(f"{path}: cannot be imported: {_one_line(error, path)}") from error
    return module


def _call(name: str, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        result = factory(*arguments)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UsageError(f"{name}: failed: {_one_line(error, Path(name.rpartition(':')[0]))}") from error
    if result is None:
        raise UsageError(f"{name}: returned None; return a model, or arrays for --inputs")
    return result


def _one_line(error: BaseException, path: Path) -> str:
    """The error, and the line of the file in which it arose."""
    lines = []
    traceback = error.__traceback__
    while traceback is not None:
        if os.path.abspath(traceback.tb_frame.f_code.co_filename) == str(path.absolute()):
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    place = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}".splitlines()[0] + place


def _inputs(name: str) -> Sequence[Any] | Mapping[str, Any]:
    """The arrays of an .npz file in their order, that of an .npy file, or what a function of a Python file returns."""
    if ".py:" in name:
        result = _call(name, _function(name), ())
        return result if isinstance(result, (tuple, list, Mapping)) else (result,)
    if not os.path.isfile(name):
        raise UsageError(f"{name}: there is no such file")
    try:
        loaded = np.load(name, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return (loaded,)
        with loaded as file:
            arrays = tuple(file[key] for key in file.files)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"{name}: is not an .npz or .npy file of arrays ({str(error).splitlines()[0]})") from None
    if not arrays:
        raise UsageError(f"{name}: has no arrays")
    return arrays
