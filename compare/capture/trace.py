"""A trace: every operation of a forward pass, with its values in float64, its module and its source line."""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import Arrays

_CALL = 3000  # numbers that the call of an operation costs beyond those that it computes
_FIRST = 1024  # numbers of a value that are compared first
DEPTH = 4  # lines of an operation: its own and those of its callers
# Packages whose frames are not the model's own code. An installed model, such as one of `transformers`, is not here.
_LIBRARIES = ("torch", "jax", "jaxlib", "flax", "optax", "equinox", "haiku", "jaxtyping", "beartype", "numpy", "einops")


class CaptureError(ValueError):
    """A model cannot be recorded; the message states why, where, and what to do."""


# (inputs, settings) -> outputs; inputs may be narrow, and outputs that are views of these are as narrow
Compute = Callable[[Sequence[np.ndarray], Mapping[str, Any]], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Operation:
    """One operation. Its inputs and outputs are indices into `Trace.values`."""

    name: str  # as the framework names it: `aten.gelu`, `dot_general`
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str  # path of the module, or the scope; empty outside of all
    lines: tuple[str, ...]  # `file:line` in the model's own code, innermost first, then its callers; may be unknown
    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments that are not arrays
    compute: Compute | None = field(default=None, repr=False, compare=False)  # None: it cannot be computed anew

    @property
    def line(self) -> str:
        """The innermost line; empty if unknown."""
        return next(iter(self.lines), "")


@dataclass(frozen=True)
class Code:
    """The lines of a class."""

    file: str  # `folder/file.py`
    lines: range

    def __contains__(self, line: str) -> bool:
        file, _, number = line.rpartition(":")
        return file == self.file and int(number) in self.lines


@dataclass
class Trace:
    """The values of a forward pass, and the operations that computed them, in the order of execution.

    Floating-point values are float64 whatever the model's dtype is; integers and booleans keep theirs.
    """

    framework: str  # "PyTorch" or "JAX"
    values: Arrays = field(default_factory=Arrays)
    operations: list[Operation] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()  # names of parameters that are not trained, where the framework tells
    inputs: dict[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # of inputs that were given by name
    outputs: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)  # of parameters, where cotangents were given
    settled: frozenset[int] = frozenset()  # values that are known to be right, such as those of the forward pass
    random: frozenset[str] = frozenset()  # names of operations that draw random numbers
    derived: set[int] = field(default_factory=set)  # values of backward passes that the model itself runs
    branches: list[str] = field(default_factory=list)  # lines of branches that the inputs did not reach
    notes: list[str] = field(default_factory=list)  # what was computed otherwise than usual, by line
    code: Mapping[str, "Code"] = field(default_factory=dict)  # of modules, by path, where it is known

    def __post_init__(self) -> None:
        self.values = Arrays(self.values)

    def add(self, value: np.ndarray) -> int:
        """The number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    @property
    def given(self) -> dict[str, int]:
        """The inputs by the names under which they were given, or else by position."""
        parts = ((name, *name.partition("."), number) for name, number in self.inputs.items())
        return {self.names.get(n, self.names.get(head, head) + dot + rest): i for n, head, dot, rest, i in parts}

    def ancestors(self, ends: Iterable[int] | None = None) -> set[int]:
        """Numbers of the values that these ends, by default outputs and gradients, depend on; ends included."""
        reached = {*self.outputs.values(), *self.gradients.values()} if ends is None else set(ends)
        for operation in reversed(self.operations):
            if not reached.isdisjoint(operation.outputs):
                reached.update(operation.inputs)
        return reached

    def dependents(self, numbers: Iterable[int]) -> set[int]:
        """Numbers of the values that depend on these; themselves included."""
        reached = set(numbers)
        for operation in self.operations if reached else ():
            if not reached.isdisjoint(operation.inputs):
                reached.update(operation.outputs)
        return reached

    def unused_parameters(self) -> list[str]:
        """Parameters that no output depends on."""
        reached = self.ancestors()
        return [name for name, number in self.parameters.items() if number not in reached]

    def replay(
        self,
        changes: Mapping[int, np.ndarray],
        operations: Iterable[Operation] | None = None,
        fixed: Container[int] = (),
        limit: int | None = None,
        work: list[float] | None = None,
    ) -> dict[int, np.ndarray]:
        """The values that these changes lead to, themselves included; loops and branches run as they did.

        `operations`: those to compute anew, in order; default: all that depend on a change. `fixed`: values that stay.
        `limit`: the number of operations after which the rest is left out. `work`: a count of numbers to be added to.
        """
        values = dict(changes)
        changed, kept = values.keys(), self.values.kept  # of each of thousands of replays
        computed = 0
        for operation in self.operations if operations is None else operations:
            if operation.compute is None or changed.isdisjoint(operation.inputs):
                continue
            if computed == limit:
                break
            computed += 1
            arrays = [values[n] if n in values else kept(n) for n in operation.inputs]
            results = operation.compute(arrays, operation.settings)
            if work is not None:
                work[0] += _CALL
                for array in (*arrays, *results):
                    work[0] += array.size
            for number, result in zip(operation.outputs, results, strict=True):
                if number not in values and number not in fixed and not _same(result, self.values[number]):
                    values[number] = result
        return values

    def check_deterministic(self, remedy: str) -> None:
        """Raises: CaptureError if an output depends on random numbers."""
        reached = self.ancestors()
        for operation in self.operations:
            if operation.name in self.random and not reached.isdisjoint(operation.outputs):
                place = operation.line or operation.module or "the forward pass"
                raise CaptureError(f"{place}: {operation.name} draws random numbers; {remedy}")


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal; of few numbers, their bits, which takes a tenth of the time."""
    if one.size <= _FIRST and one.dtype == other.dtype:
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    floating = one.dtype.kind in "fc"
    if one.shape != other.shape or not np.array_equal(one.flat[:_FIRST], other.flat[:_FIRST], equal_nan=floating):
        return False
    return bool((one == other).all()) or (floating and np.array_equal(one, other, equal_nan=True))


def as_float64(array: Any) -> np.ndarray:
    """A copy in numpy; floating-point numbers of any width as float64, complex ones as complex128."""
    array = np.asarray(array)
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.copy() if array.dtype.kind in "biu" else array.astype(np.float64)


def named(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested mappings, sequences, named tuples and dataclass-like outputs; None is no leaf."""
    if tree is None:
        return
    if isinstance(tree, Mapping):
        entries: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)):
        entries = zip(fields, tree, strict=True)
    elif isinstance(tree, (list, tuple)):
        entries = enumerate(tree)
    else:
        yield prefix or "output", tree
        return
    for key, leaf in entries:
        yield from named(leaf, f"{prefix}.{key}" if prefix else str(key))


def dotted(path: Any) -> str:
    """The name of a leaf whose path in a tree of JAX or PyTorch is this."""
    return ".".join(_key(key) for key in path if _key(key))


def _key(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name)).lstrip(".")
    return str(key)


@cache  # of each frame of each operation
def is_library(file: str) -> bool:
    """Whether a file belongs to a framework, to the standard library or to this folder."""
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py") in _LIBRARIES
    return file.startswith(_GENERATED) or any(Path(file).is_relative_to(folder) for folder in (_HERE, _STANDARD))


def own_lines(frames: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """`folder/file.py:number` of the frames (file, number) that are the model's own code, at most DEPTH.

    Frames are innermost first; those after a recorder's are of its caller.
    """
    outside = dropwhile(lambda frame: _is_recording(frame[0]), frames)
    inside = takewhile(lambda frame: frame[0] not in _RECORDERS, outside)
    own = (f"{_short(file)}:{number}" for file, number in inside if not is_library(file))
    return tuple(islice(own, DEPTH))


@cache
def _is_recording(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent


@cache
def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def where_raised(error: BaseException) -> str:
    """` (folder/file.py:line)`: the innermost line of the model's own code in an error's traceback; else empty."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    recorded = [i for i, (file, _) in enumerate(frames) if file in _RECORDERS]
    own = own_lines(reversed(frames[max(recorded, default=-1) + 1 :]))
    return f" ({own[0]})" if own else ""


_GENERATED = ("<frozen", "<@beartype", "<__")  # other names in angle brackets are a prompt's or a notebook's
_HERE = Path(__file__).parents[1]
_RECORDERS = tuple(str(Path(__file__).with_name(name)) for name in ("torch_trace.py", "jax_trace.py"))
_STANDARD = Path(sys.modules["dataclasses"].__file__ or "").parent
