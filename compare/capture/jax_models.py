"""Models of Flax and Equinox as functions of (parameters, inputs), with the paths of their modules as scopes."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .jax_trace import MODULE_SCOPE
from .trace import CaptureError, Code, dotted, named

Function = Callable[..., Any]  # (parameters, *inputs) -> outputs


def as_function(model: Any) -> tuple[Function, Any]:
    """(function, parameters) of a module, or of a pair (function or Linen module, parameters).

    Raises:
        CaptureError: it is none of these.
    """
    if isinstance(model, tuple) and len(model) == 2:
        function, parameters = model
        if hasattr(function, "apply") and _is_a(function, "flax.linen", "Module"):
            return _of_linen(function), parameters
        if callable(function):
            return function, parameters
    if _is_a(model, "flax.nnx", "Module"):
        return _of_nnx(model)
    if callable(model) and _is_a(model, "equinox", "Module"):
        return _of_tree(model)
    raise CaptureError(
        f"{type(model).__name__}: is not a supported model; return a PyTorch, NNX or Equinox module, a pair of a Linen "
        "module and its variables, or a pair of a function of (parameters, *inputs) and its parameters"
    )


def code_of_modules(model: Any) -> dict[str, Code]:
    """The code of the modules within an NNX or Equinox module by their paths; of others, nothing."""
    kinds = [sys.modules[p].Module for p in ("flax.nnx", "equinox") if _is_a(model, p, "Module")]
    codes: dict[type, Code | None] = {}
    found: dict[str, Code] = {}
    for path, module in _modules(model, kinds[0], "", set()) if kinds else ():
        cls = type(module)
        codes[cls] = code = codes[cls] if cls in codes else _code(cls)
        if code is not None:
            found[path] = code
    return found


def _code(cls: type) -> Code | None:
    try:
        lines, start = inspect.getsourcelines(cls)
        file = Path(inspect.getfile(cls))
    except (OSError, TypeError):  # defined in a prompt, or in C
        return None
    return Code("/".join(file.parts[-2:]), range(start, start + len(lines)))


def buffers_of(model: Any) -> frozenset[str]:
    """The names of variables of NNX and Linen that are no parameters."""
    parameters = as_function(model)[1]
    names = {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)}
    if _is_a(model, "flax.nnx", "Module"):
        nnx = sys.modules["flax.nnx"]
        trained = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return frozenset(names - {".".join(map(str, path)) for path, _ in trained})
    if isinstance(model, tuple) and _is_a(model[0], "flax.linen", "Module") and "params" in parameters:
        return frozenset(name for name in names if name.split(".")[0] != "params")
    return frozenset()


def with_buffers_fixed(model: Any, function: Function) -> Function:
    """The model's function, in which variables of NNX and Linen that are no parameters have no gradient."""
    names = buffers_of(model)
    if not names:
        return function

    def run(parameters: Any, *inputs: Any) -> Any:
        def fixed(path: Any, leaf: Any) -> Any:
            return jax.lax.stop_gradient(leaf) if dotted(path) in names else leaf

        return function(jax.tree_util.tree_map_with_path(fixed, parameters), *inputs)

    return run


def _is_a(model: Any, package: str, name: str) -> bool:
    """Whether it is an instance of a class of a package, which need not be installed."""
    kind = getattr(sys.modules.get(package), name, None)
    return kind is not None and isinstance(model, kind)


def _of_linen(module: Any) -> Function:
    """A module's function; collections that it writes to, such as batch statistics, are further outputs."""

    def apply(variables: Any, *inputs: Any) -> Any:
        try:
            return module.apply(variables, *inputs)
        except sys.modules["flax"].errors.ModifyScopeVariableError:
            written = [name for name in variables if name != "params"]
            outputs, state = module.apply(variables, *inputs, mutable=written)
            leaves = jax.tree_util.tree_leaves_with_path(state)
            return dict(named(outputs)) | {dotted(path): leaf for path, leaf in leaves}

    return apply


def _of_nnx(model: Any) -> tuple[Function, Any]:
    """Variables are the parameters, and arrays that the modules hold as they are; not the state of random numbers.

    Variables that the module writes to, such as batch statistics, are further outputs.
    """
    nnx = sys.modules["flax.nnx"]
    graph, state = nnx.split(model)
    flat = [(".".join(map(str, path)), path, leaf) for path, leaf in nnx.to_flat_state(state)]
    parameters = {
        name: leaf[...] if isinstance(leaf, nnx.Variable) else leaf
        for name, _, leaf in flat
        if not isinstance(leaf, nnx.RngState)
    }

    def run(parameters: Mapping[str, Any], *inputs: Any) -> Any:
        leaves = []
        for name, path, leaf in flat:
            if isinstance(leaf, nnx.Variable):
                leaves.append((path, leaf.replace(parameters.get(name, leaf[...]))))
            else:
                leaves.append((path, parameters[name]))
        merged = nnx.merge(graph, nnx.from_flat_state(leaves))
        before = _variables(merged)
        with module_scopes(merged, nnx.Module):
            outputs = merged(*inputs)
        after = _variables(merged)
        written = {name: array for name, array in after.items() if array is not before.get(name, array)}
        return dict(named(outputs)) | written if written else outputs

    return run, parameters


def _variables(module: Any) -> dict[str, Any]:
    """The arrays of a module's variables; not the state of random numbers."""
    nnx = sys.modules["flax.nnx"]
    flat = nnx.to_flat_state(nnx.state(module))
    return {
        ".".join(map(str, path)): leaf.get_value()
        for path, leaf in flat
        if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState)
    }


def _of_tree(model: Any) -> tuple[Function, Any]:
    """A callable tree: its arrays are the parameters, its other leaves stay as they are."""
    paths, structure = jax.tree_util.tree_flatten_with_path(model)
    names = [jax.tree_util.keystr(path).lstrip(".").replace("[", ".").replace("]", "") for path, _ in paths]
    kinds = jax.Array, np.ndarray, np.generic
    parameters = {name: leaf for name, (_, leaf) in zip(names, paths, strict=True) if isinstance(leaf, kinds)}

    def run(parameters: Mapping[str, Any], *inputs: Any) -> Any:
        leaves = [parameters.get(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]
        rebuilt = jax.tree_util.tree_unflatten(structure, leaves)
        with module_scopes(rebuilt, sys.modules["equinox"].Module):
            return rebuilt(*inputs)

    return run, parameters


@contextmanager
def module_scopes(root: Any, kind: type) -> Iterator[None]:
    """While it lasts, every call of a module within `root` has the module's path as its scope."""
    paths = {id(module): path for path, module in _modules(root, kind, "", set())}
    classes = {type(module) for _, module in _modules(root, kind, "", set()) if callable(module)}
    restored: list[tuple[type, Any]] = []
    for cls in classes:
        restored.append((cls, cls.__dict__.get("__call__")))
        type.__setattr__(cls, "__call__", _scoped(cls.__call__, paths))
    try:
        yield
    finally:
        for cls, call in restored:
            if call is None:
                type.__delattr__(cls, "__call__")
            else:
                type.__setattr__(cls, "__call__", call)


def _scoped(call: Any, paths: Mapping[int, str]) -> Any:
    @functools.wraps(call)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        path = paths.get(id(self))
        if not path:  # the root, or a copy that a transformation made
            return call(self, *arguments, **keywords)
        with jax.named_scope(MODULE_SCOPE + path):
            return call(self, *arguments, **keywords)

    return run


def _modules(value: Any, kind: type, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """(path, module) of every module that is reached through attributes, sequences and mappings."""
    if id(value) in seen:
        return
    if isinstance(value, kind):
        seen.add(id(value))
        yield path, value
        entries: Any = vars(value).items()
    elif isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    else:
        return
    for name, child in entries:
        yield from _modules(child, kind, f"{path}.{name}" if path else str(name), seen)
