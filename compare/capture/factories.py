"""Loads models and inputs from a user's files: `file.py:function`, and .npz or .npy files."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .trace import CaptureError


@contextmanager
def import_path() -> Iterator[None]:
    """Restore the import path after the folders of files were added."""
    before = [*sys.path]
    try:
        yield
    finally:
        sys.path[:] = before


def function_of(name: str) -> Callable[..., Any]:
    """The function that `file.py:name` names.

    Raises:
        CaptureError: there is none, or the file cannot be imported.
    """
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise CaptureError(f"{name}: must name a function in a Python file, as in port.py:make")
    if not os.path.isfile(path):
        raise CaptureError(f"{path}: there is no such file")
    module = _module(Path(path))
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise CaptureError(f"{name}: {path} has no function {attribute}; it has {', '.join(names) or 'none'}")
    return function


def factory_of(name: str, layers: int | None) -> Callable[..., Any]:
    """The function that `file.py:name` names, which returns a model; with so many layers, unless they are None.

    Raises:
        CaptureError: there is none, or it has no parameter `layers`.
    """
    function = function_of(name)
    if layers is None:
        return function
    if "layers" not in inspect.signature(function).parameters:
        raise CaptureError(f"{name}: has no parameter layers; add layers=None to it, for --layers {layers}")
    return partial(function, layers=layers)


def needs_parameters(factory: Callable[..., Any]) -> bool:
    """Whether a function that returns a model takes the reference's parameters."""
    return any(
        p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values()
    )


def _module(path: Path) -> ModuleType:
    """The module in a file, which can import what lies beside it; two files of one name are two modules."""
    name = f"compared_{abs(hash(path.resolve()))}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{path}: cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        del sys.modules[name]
        raise CaptureError(f"{path}: cannot be imported: {_one_line(error, path)}") from error
    return module


def called(name: str, factory: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Any:
    """What a function of a user's file returns.

    Raises:
        CaptureError: it fails, or returns None.
    """
    try:
        result = factory(*arguments)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        line = f"{name}: failed: {_one_line(error, Path(name.rpartition(':')[0]))}"
        is_class = inspect.isclass(factory) and bool(arguments)
        advice = "; it is a class, and got the parameters: name a function that returns the model"
        raise CaptureError(line + advice * is_class) from error
    if result is None:
        raise CaptureError(f"{name}: returned None; return a model, or arrays for --inputs")
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


def inputs_of(name: str) -> Sequence[Any] | Mapping[str, Any]:
    """The arrays of an .npz file in their order, that of an .npy file, or what a function of a Python file returns.

    Raises:
        CaptureError: the file has no arrays, or the function fails.
    """
    if ".py:" in name:
        result = called(name, function_of(name))
        return result if isinstance(result, (tuple, list, Mapping)) else (result,)
    if not os.path.isfile(name):
        hint = "; a function is named as in ref.py:inputs" if ":" in name else ""
        raise CaptureError(f"{name}: there is no such file{hint}")
    if name.endswith(".py"):
        raise CaptureError(f"{name}: name its function too, as in {name}:inputs")
    try:
        loaded = np.load(name, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return (loaded,)
        with loaded as file:
            arrays = tuple(file[key] for key in file.files)
    except (ValueError, OSError, EOFError):
        raise CaptureError(f"{name}: is not an .npz or .npy file of arrays") from None
    if not arrays:
        raise CaptureError(f"{name}: has no arrays")
    return arrays
