"""What an operation could compute instead: the mistakes that ports make, each undone.

The catalogue holds for the operations of both frameworks. Nothing here knows which alternative is right.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, product
from typing import Any

import numpy as np
from scipy import special

from ..capture.trace import Operation

Array = np.ndarray
UNARY = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "square": np.square,
    "negative": np.negative,
    "sin": np.sin,
    "cos": np.cos,
    "absolute": np.abs,
    "erf gelu": lambda x: x * special.ndtr(x),
    "tanh gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "x sigmoid(1.702 x)": lambda x: x * special.expit(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * special.expit(x),
    "sigmoid": special.expit,
    "softplus": lambda x: np.logaddexp(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "1 - x": lambda x: 1 - x,
}
_BINARY = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
}
_ORDERED = {"sub": np.subtract, "div": np.divide, "pow": np.power}  # functions of two operands in their order
_COMPARISONS = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal}
_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "max", "min", "rsub", "maximum", "minimum", "neg", "exp", "log", "tanh", "sqrt"),
    *("rsqrt", "square", "logistic", "sigmoid", "erf", "gelu", "relu", "silu", "sin", "cos", "abs", "copy"),
    *("elu", "softplus", "clone", "pow", "hardtanh", "leaky_relu", "stop_gradient", "detach", "erfc", "log1p"),
    *("expm1", "integer_pow"),
)
_AXES = ("axes", "axis", "dimension", "dim")
COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")


@dataclass(frozen=True)
class Alternative:
    """Another value for an operation's output, with what it does in words; of several, the lowest rank is taken."""

    value: Array
    text: str
    rank: int


def alternatives(operation: Operation, inputs: Sequence[Array], output: Array, below: int) -> Iterator[Alternative]:
    """Other outputs of an operation with one output, of the same shape and a rank below this, the lowest first."""
    sources = (_settings, _swapped, _substituted, _negated, _bypassed, _rearranged_inputs, _of_two, _bounded)
    for rank, source in zip((0, 0, 0, 1, 2, 2, 2, 3), sources, strict=True):
        for value, text in source(operation, inputs, output) if rank < below else ():
            if value.shape == output.shape and value.dtype == output.dtype:
                yield Alternative(value, text, rank)


Found = Iterator[tuple[Array, str]]


def kind(operation: Operation) -> str:
    """The operation's name without its framework's prefix and the underscore of writing in place."""
    return operation.name.removeprefix("aten.").strip("_")


def _settings(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    """Another axis, a flag the other way, the other approximation, a slice that starts one earlier or later."""
    others = [o for key, value in operation.settings.items() for o in _other_settings(operation, key, value, inputs)]
    for other in chain(others, other_paddings(operation, inputs, output)):
        results = _compute(operation, inputs, {**operation.settings, **other})
        if results is not None:
            texts = [f"{name} {_short(operation.settings[name])} → {_short(v)}" for name, v in other.items()]
            yield results, f"{kind(operation)}: {', '.join(texts)}"


def _other_settings(operation: Operation, key: str, value: Any, inputs: Sequence[Array]) -> Iterator[Mapping[str, Any]]:
    ndim = max((array.ndim for array in inputs), default=0)
    if (isinstance(value, bool) and operation.name.startswith("aten.")) or key == "reverse":
        yield {key: not value}
    elif isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        for step in (-1, 1, -2, 2):
            yield {key: np.asarray(value + step)}
    elif key == "y" and isinstance(value, int):  # the exponent of `integer_pow`
        yield from ({key: value + step} for step in (-1, 1, -2, 2))
    elif isinstance(value, str) and value in ("none", "tanh"):
        yield {key: "tanh" if value == "none" else "none"}
    elif key in _AXES or (operation.name.startswith("aten.") and ndim > 1 and not isinstance(value, np.ndarray)):
        for axis in _other_axes(value, ndim):
            yield {key: type(value)([axis]) if isinstance(value, (list, tuple)) else axis}
    elif key == "start_indices" and isinstance(value, tuple) and operation.settings.get("limit_indices"):
        for axis, step in ((axis, step) for axis in range(len(value)) for step in (-1, 1)):
            starts, limits = list(value), list(operation.settings["limit_indices"])
            starts[axis] += step
            limits[axis] += step
            if starts[axis] >= 0 and limits[axis] <= inputs[0].shape[axis]:
                yield {key: tuple(starts), "limit_indices": tuple(limits)}


def _other_axes(value: Any, ndim: int) -> Iterator[int]:
    """The axes that a setting does not name, if it names one: as a number, or as the only entry of a sequence."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(numbers) == 1 and isinstance(numbers[0], (int, np.integer)) and -ndim <= numbers[0] < ndim:
        yield from (axis for axis in range(ndim) if axis != numbers[0] % ndim)


def _compute(operation: Operation, inputs: Sequence[Array], settings: Mapping[str, Any]) -> Array | None:
    """The only output with these inputs and settings; None if that is impossible."""
    assert operation.compute is not None
    try:
        (result,) = operation.compute(inputs, settings)
    except (ValueError, IndexError, TypeError, RuntimeError, AssertionError):
        return None  # this alternative does not exist
    return np.asarray(result)


def other_paddings(operation: Operation, inputs: Sequence[Array], output: Array) -> Iterator[Mapping[str, Any]]:
    """Paddings of a convolution or pooling that lead to the same shape: of all axes alike, then of one."""
    padding, windows = operation.settings.get("padding"), _windows(operation, inputs, output)
    if padding is None or len(windows) != len(padding):
        return
    possible = [list(_same_size(*window)) for window in windows]
    axes = [i for i, (_, size, _, _) in enumerate(windows) if size > 1]
    for pair in possible[axes[0]] if axes else ():
        if all(pair in possible[i] for i in axes):
            yield {"padding": tuple(pair if i in axes else old for i, old in enumerate(padding))}
    for axis in axes if len(axes) > 1 else ():
        for pair in possible[axis]:
            yield {"padding": tuple(pair if i == axis else old for i, old in enumerate(padding))}


def _windows(operation: Operation, inputs: Sequence[Array], output: Array) -> list[tuple[int, int, int, int]]:
    """(size of the input, of the window, of the output, stride) of each axis that is padded; dilated sizes."""
    settings = operation.settings
    if operation.name == "conv_general_dilated":
        (lhs, rhs, out), sides = settings["dimension_numbers"], inputs
        axes = zip(lhs[2:], rhs[2:], out[2:], strict=True)
        sizes = [(sides[0].shape[i], sides[1].shape[j], output.shape[k]) for i, j, k in axes]
        dilations = settings["lhs_dilation"], settings["rhs_dilation"]
    elif operation.name.startswith("reduce_window") and "window_dimensions" in settings:
        sizes = list(zip(inputs[0].shape, settings["window_dimensions"], output.shape, strict=True))
        dilations = settings["base_dilation"], settings["window_dilation"]
    else:
        return []
    return [
        ((size - 1) * base + 1, (window - 1) * dilation + 1, out, stride)
        for (size, window, out), base, dilation, stride in zip(
            sizes, *dilations, settings["window_strides"], strict=True
        )
    ]


def _same_size(size: int, window: int, out: int, stride: int) -> Iterator[tuple[int, int]]:
    """(low, high) of at most a window, the most even ones first."""
    for low, high in sorted(product(range(window), repeat=2), key=lambda pair: abs(pair[0] - pair[1])):
        if (size + low + high - window) // stride + 1 == out:
            yield low, high


def _swapped(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    """Two inputs of the same shape, or two parts of a concatenation, the other way round."""
    if kind(operation) in ("add", "mul", "max", "min") and len(inputs) == 2:
        return
    for i, j in combinations(range(len(inputs)), 2):
        joined = kind(operation) in ("concatenate", "cat") and output.dtype != bool  # a mask is moved
        fits = inputs[i].shape == inputs[j].shape or joined or kind(operation) in _ORDERED
        if fits and not np.array_equal(inputs[i], inputs[j]):
            order = list(inputs)
            order[i], order[j] = order[j], order[i]
            value = _compute(operation, order, operation.settings)
            if value is not None:
                yield value, f"{kind(operation)}: inputs {i + 1} and {j + 1} swapped"
    numbers = [v for v in operation.settings.values() if isinstance(v, np.ndarray) and v.ndim == 0]
    function = _ORDERED.get(kind(operation))
    if function is not None and len(inputs) == len(numbers) == 1:
        with np.errstate(all="ignore"):
            values = np.asarray(function(inputs[0], numbers[0])), np.asarray(function(numbers[0], inputs[0]))
        other = values[0] if np.array_equal(values[1], output, equal_nan=output.dtype.kind == "f") else values[1]
        yield other, f"{kind(operation)}: operands swapped"


def _substituted(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    """Another function of the same inputs."""
    name = kind(operation)
    operands = _operands(operation, inputs)
    if name in COMPARING and len(operands) == 2:
        for text, function in _COMPARISONS.items():
            value = function(*operands)
            if not np.array_equal(value, ~output):
                yield value, f"{name} → {text}"
    if output.dtype == bool:
        for axis, step in ((axis, step) for axis in range(output.ndim) for step in (-1, 1)):
            yield np.roll(output, step, axis), f"{name}: mask moved by {step} along axis {axis}"
            for fill in (False, True):
                yield shifted(output, axis, step, fill), f"{name}: mask shifted by {step} along axis {axis}"
    if name == "reduce_sum" and inputs[0].dtype.kind == "f":
        yield output / max(inputs[0].size // max(output.size, 1), 1), f"{name} → mean"
    if name not in _ELEMENTWISE:
        return
    if output.dtype.kind == "i":
        yield -output, f"{name}: negated"
    with np.errstate(all="ignore"):
        if len(operands) == 1 and output.dtype.kind == "f":
            for text, function in UNARY.items():
                yield function(operands[0]), f"{name} → {text}"


def _of_two(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    """Another function of two operands; a softmax does not tell a missing factor from a sum."""
    operands = [*inputs, *(v for v in operation.settings.values() if isinstance(v, np.ndarray))]
    if kind(operation) in _ELEMENTWISE and len(operands) == 2 and output.dtype.kind == "f":
        with np.errstate(all="ignore"):
            for text, function in _BINARY.items():
                yield np.asarray(function(*operands)), f"{kind(operation)} → {text}"


def _bounded(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    if kind(operation) in _ELEMENTWISE and len(inputs) == 2:
        yield np.maximum(*inputs), f"{kind(operation)} → maximum"
        yield np.minimum(*inputs), f"{kind(operation)} → minimum"


def shifted(array: Array, axis: int, step: int, fill: Any) -> Array:
    """An array moved along an axis; `fill` where nothing moves in."""
    moved = np.roll(array, step, axis)
    index = [slice(None)] * array.ndim
    index[axis] = slice(0, step) if step > 0 else slice(step, None)
    moved[tuple(index)] = fill
    return moved


def _negated(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    """True for False: people rather exchange the cases of a selection."""
    if output.dtype != bool:
        return
    operands = _operands(operation, inputs)
    if kind(operation) in COMPARING and len(operands) == 2:
        for text, function in _COMPARISONS.items():
            if np.array_equal(function(*operands), ~output):
                yield ~output, f"{kind(operation)} → {text}"
    yield ~output, f"{kind(operation)}: True and False swapped"


def _operands(operation: Operation, inputs: Sequence[Array]) -> list[Array]:
    return [*inputs, *(v for v in operation.settings.values() if isinstance(v, np.ndarray))]


def _bypassed(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    """The operation left out, or a complex one conjugated."""
    for i, array in enumerate(inputs):
        if array.dtype == output.dtype and array.size and kind(operation) not in ("copy", "clone"):
            try:
                value = np.broadcast_to(array, output.shape)
            except ValueError:
                continue
            yield value, f"without {kind(operation)}" + (f", input {i + 1} alone" if len(inputs) > 1 else "")
    if output.dtype.kind == "c" and (kind(operation) in _ELEMENTWISE or "fft" in operation.name):
        yield np.conj(output), f"{kind(operation)}: conjugated"


def _rearranged_inputs(operation: Operation, inputs: Sequence[Array], output: Array) -> Found:
    if kind(operation) in ("reshape", "view", "unsafe_view", "_unsafe_view"):
        yield from _regrouped(inputs[0], output)
    if kind(operation) in ("transpose", "permute"):
        yield inputs[0].reshape(output.shape), "reshaped instead of permuted"
    for i, array in enumerate(inputs):
        for other, text in arrangements(array):
            order = [*inputs[:i], other, *inputs[i + 1 :]]
            value = _compute(operation, order, operation.settings)
            if value is not None:
                yield value, f"{kind(operation)}: input {i + 1} {text}"


def _regrouped(array: Array, output: Array) -> Found:
    """A transpose in place of a reshape, or neighboring axes split or joined in the other order."""
    if array.ndim == output.ndim and sorted(array.shape) == sorted(output.shape):
        for order in permutations(range(array.ndim)):
            if tuple(array.shape[i] for i in order) == output.shape:
                yield array.transpose(order), f"axes permuted as {order} instead of reshaped"
    for i in range(output.ndim - 1):
        shape = [*output.shape[:i], output.shape[i + 1], output.shape[i], *output.shape[i + 2 :]]
        yield array.reshape(shape).swapaxes(i, i + 1), f"axis split as {output.shape[i + 1]} × {output.shape[i]}"
    for i in range(array.ndim - 1):
        yield array.swapaxes(i, i + 1).reshape(output.shape), f"axes {i} and {i + 1} joined in the other order"


def arrangements(array: Array) -> Found:
    """The same numbers in another order: equal axes swapped, one axis flipped, moved by one, its blocks reordered."""
    for i, j in combinations(range(array.ndim), 2):
        if array.shape[i] == array.shape[j] > 1:
            yield array.swapaxes(i, j), f"with axes {i} and {j} swapped" if array.ndim > 2 else "transposed"
    for i in range(array.ndim - 1):
        a, b = array.shape[i : i + 2]
        if a != b and min(a, b) > 1:
            split = array.reshape(*array.shape[:i], b, a, *array.shape[i + 2 :]).swapaxes(i, i + 1)
            yield split, f"with axes {i} and {i + 1} split as {b} × {a}"
            joined = array.swapaxes(i, i + 1).reshape(array.shape)
            yield joined, f"with axes {i} and {i + 1} joined in the other order"
    if array.ndim > 2:  # the kernel of a convolution, beside a cross-correlation's
        for i, j in combinations(range(array.ndim), 2):
            yield np.flip(array, (i, j)), f"reversed along axes {i} and {j}"
    for axis, size in enumerate(array.shape):
        if size > 1:
            for step in (-1, 1):
                yield np.roll(array, step, axis), f"moved by {step} along axis {axis}"
            yield np.flip(array, axis), f"reversed along axis {axis}"
        for count in (2, 3, 4):
            if size % count == 0 and size > count:
                for order in list(permutations(range(count)))[1:]:
                    blocks = np.split(array, count, axis)
                    text = f"with blocks {' '.join(str(n + 1) for n in order)} of axis {axis}"
                    yield np.concatenate([blocks[n] for n in order], axis), text
        for outer in (n for n in range(2, size) if size % n == 0):
            split = array.reshape(*array.shape[:axis], outer, size // outer, *array.shape[axis + 1 :])
            yield split.swapaxes(axis, axis + 1).reshape(array.shape), f"interleaved {outer} × {size // outer}"


def insertions(output: Array, operands: Iterable[tuple[Array, str]]) -> Iterator[Alternative]:
    """A step that is missing after a value: a function of it, or an operation with one of these arrays."""
    if output.dtype.kind != "f":
        if output.dtype.kind == "i":
            yield Alternative(-output, "missing: negative", 3)
        return
    with np.errstate(all="ignore"):
        for array, name in operands:
            for shape in _broadcastable(array, output.shape):
                for symbol in ("+", "*", "/", "-"):
                    yield Alternative(_BINARY[symbol](output, array.reshape(shape)), f"missing: {symbol} {name}", 3)
        for text, function in UNARY.items():
            yield Alternative(function(output), f"missing: {text}", 3)


def _broadcastable(array: Array, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The shapes in which a scalar, a vector or an array of the same size can be combined with one of a shape."""
    if array.size == 1:
        yield ()
    elif array.shape == tuple(shape):
        yield array.shape
    elif array.ndim == 1:
        for axis, size in enumerate(shape):
            if size == array.size:
                yield tuple(size if i == axis else 1 for i in range(len(shape)))
    elif array.ndim < len(shape) and array.shape == tuple(shape)[-array.ndim :]:
        yield array.shape


def _short(value: Any) -> str:
    return f"{float(value):.6g}" if np.ndim(value) == 0 and np.asarray(value).dtype.kind == "f" else str(value)
