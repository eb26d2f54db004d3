"""JAX's primitives in NumPy, in float64: compiling each of them would take longer than the model.

Each function has the primitive's parameters as keywords, and returns one array or a list. What is not here is
computed by JAX.
"""

import importlib.metadata
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy import special  # which JAX depends on

from .arrays import dtype_of, is_narrow
from .trace import CaptureError

Array = np.ndarray


def dot_general(a: Array, b: Array, *, dimension_numbers: Any, preferred_element_type: Any = None, **_: Any) -> Array:
    """Contract and batch the given axes; result: batch, rest of a, rest of b."""
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    rest_a = [i for i in range(a.ndim) if i not in (*contract_a, *batch_a)]
    rest_b = [i for i in range(b.ndim) if i not in (*contract_b, *batch_b)]
    batch = [a.shape[i] for i in batch_a]
    inner = math.prod(a.shape[i] for i in contract_a)
    if preferred_element_type is not None:
        a, b = (x.astype(dtype_of(preferred_element_type), copy=False) for x in (a, b))
    left = a.transpose(*batch_a, *rest_a, *contract_a).reshape(*batch, -1, inner)
    right = b.transpose(*batch_b, *contract_b, *rest_b).reshape(*batch, inner, -1)
    shape = [*batch, *(a.shape[i] for i in rest_a), *(b.shape[i] for i in rest_b)]
    return np.matmul(left, right).reshape(shape)


def broadcast_in_dim(
    x: Array, *dynamic: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> Array:
    """Places x's axes at `broadcast_dimensions` and repeats it along the others."""
    axes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([axes.get(i, 1) for i in range(len(shape))]), shape)


def iota(*dynamic: Any, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> Array:
    """0, 1, 2, … along one axis."""
    line = np.arange(shape[dimension], dtype=dtype_of(dtype))
    return np.broadcast_to(line.reshape([-1 if i == dimension else 1 for i in range(len(shape))]), shape)


def pad(x: Array, value: Array, *, padding_config: Sequence[tuple[int, int, int]]) -> Array:
    """Pad each axis by (low, high, between elements); negative numbers crop."""
    inner = [n + max(n - 1, 0) * between for n, (_, _, between) in zip(x.shape, padding_config, strict=True)]
    spread = np.full(inner, value, x.dtype)
    spread[tuple(slice(None, None, between + 1) for _, _, between in padding_config)] = x
    spread = np.pad(spread, [(max(low, 0), max(high, 0)) for low, high, _ in padding_config], constant_values=value)
    ends = [
        (max(-low, 0), size - max(-high, 0)) for size, (low, high, _) in zip(spread.shape, padding_config, strict=True)
    ]
    return spread[tuple(slice(*end) for end in ends)]


def _starts(x: Array, starts: Sequence[Array], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Slices of these sizes; as in JAX, starts count from the end if negative and are moved to fit."""
    numbers = [int(start) for start in starts]
    numbers = [n + size if n < 0 else n for n, size in zip(numbers, x.shape, strict=True)]
    clamped = [min(max(n, 0), full - size) for n, full, size in zip(numbers, x.shape, sizes, strict=True)]
    return tuple(slice(n, n + size) for n, size in zip(clamped, sizes, strict=True))


def dynamic_update_slice(x: Array, update: Array, *starts: Array) -> Array:
    """x with a part replaced."""
    result = x.copy()
    result[_starts(x, starts, update.shape)] = update
    return result


def sort(*arrays: Array, dimension: int, num_keys: int, **_: Any) -> list[Array]:
    """Sort by the first array, or by several of them, stably; NaN last."""
    order = np.lexsort(arrays[:num_keys][::-1], axis=dimension)
    return [np.take_along_axis(array, order, dimension) for array in arrays]


def cumulative(function: Any) -> Callable[..., Array]:
    """A cumulative operation along an axis, from its start or its end."""

    def run(x: Array, *, axis: int, reverse: bool = False) -> Array:
        ordered = np.flip(x, axis) if reverse else x
        result = function.accumulate(ordered, axis)
        return np.flip(result, axis) if reverse else result

    return run


def cumulative_logsumexp(x: Array, *, axis: int, reverse: bool = False) -> Array:
    """log of the cumulative sum of exp."""
    return cumulative(np.logaddexp)(x, axis=axis, reverse=reverse)


def index_of(function: Callable[..., Array]) -> Callable[..., Array]:
    """argmax or argmin along one axis."""
    return lambda x, *, axes, index_dtype: function(x, axis=axes[0]).astype(index_dtype)


def integer_pow(x: Array, *, y: int) -> Array:
    """x to the power of a whole number; that of 1/x if it is negative."""
    if y == 0:
        return np.ones_like(x)
    return _power(x, y) if y > 0 else 1 / _power(x, -y)


def _power(x: Array, y: int) -> Array:
    """By repeated squaring: NumPy's `**` takes a hundred times as long."""
    root = _power(x, y // 2) if y > 1 else x
    return root if y == 1 else root * root * x if y % 2 else root * root


def division(a: Array, b: Array) -> Array:
    """a / b; for integers rounded towards zero, as in JAX."""
    if a.dtype.kind not in "iu":
        return a / b
    safe = np.where(b == 0, 1, b)
    return np.where(b == 0, -1, (np.abs(a) // np.abs(safe)) * np.sign(a) * np.sign(safe)).astype(a.dtype)


def reduction(function: Any) -> Callable[..., Array]:
    """A reduction over axes."""
    return lambda x, *, axes, **_: function(x, axis=tuple(axes))


def select_n(which: Array, *cases: Array) -> Array:
    """Elements of the case with the number `which`; False is 0."""
    index = np.broadcast_to(which, cases[0].shape).astype(int)
    return np.choose(index, cases) if len(cases) < 32 else np.stack(cases)[(index, *np.indices(index.shape))]


def rounded(x: Array, *, rounding_method: Any) -> Array:
    """x rounded to whole numbers; halves to the even one, or away from zero."""
    if int(rounding_method):
        return np.round(x)
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0)


def converted(x: Array, dtype: np.dtype) -> Array:
    """x in this dtype; a large array that is kept in a narrower one is read in it later."""
    return x if is_narrow(x) and dtype_of(x.dtype) == dtype else x.astype(dtype)


def elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of arrays alone; parameters such as `accuracy` are hints."""
    return lambda *arrays, **_: function(*arrays)


PRIMITIVES: dict[str, Callable[..., Array | list[Array]]] = {
    **{
        name: elementwise(function)
        for name, function in {
            **{
                name: getattr(np, name)
                for name in ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan")
            },
            **{name: getattr(np, name) for name in ("sinh", "cosh", "sqrt", "square", "cbrt", "floor", "ceil", "sign")},
            **{
                "add": np.add,
                "add_any": np.add,
                "sub": np.subtract,
                "mul": np.multiply,
                "neg": np.negative,
                "abs": np.abs,
                "rem": np.fmod,
            },
            **{"max": np.maximum, "min": np.minimum, "pow": np.power, "nextafter": np.nextafter, "atan2": np.arctan2},
            **{"asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "is_finite": np.isfinite, "div": division},
            **{
                "asinh": np.arcsinh,
                "acosh": np.arccosh,
                "atanh": np.arctanh,
                "logistic": special.expit,
                "erf": special.erf,
            },
            **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
            **{"ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
            **{
                "not": np.invert,
                "clamp": lambda low, x, high: np.clip(x, low, high),
            },
            **{"rsqrt": lambda x: 1 / np.sqrt(x), "erfc": special.erfc, "select_n": select_n},
            **dict.fromkeys(("copy", "stop_gradient", "reduce_precision", "device_put"), lambda x: x),
            **{"sharding_constraint": lambda x: x, "name": lambda x: x, "pvary": lambda x: x},
        }.items()
    },
    **{f"reduce_{name}": reduction(getattr(np, name)) for name in ("sum", "max", "min", "prod")},
    **{"reduce_and": reduction(np.all), "reduce_or": reduction(np.any), "psum": reduction(np.sum)},
    **{"cumsum": cumulative(np.add), "cumprod": cumulative(np.multiply), "cummax": cumulative(np.maximum)},
    **{"cummin": cumulative(np.minimum), "cumlogsumexp": cumulative_logsumexp},
    **{"argmax": index_of(np.argmax), "argmin": index_of(np.argmin)},
    **{"dot_general": dot_general, "broadcast_in_dim": broadcast_in_dim, "iota": iota, "pad": pad, "sort": sort},
    **{"integer_pow": integer_pow, "dynamic_update_slice": dynamic_update_slice},
    "convert_element_type": lambda x, *, new_dtype, **_: converted(x, dtype_of(new_dtype)),
    "reshape": lambda x, *dynamic, new_sizes, **_: x.reshape(new_sizes),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "squeeze": lambda x, *, dimensions: x.reshape([n for i, n in enumerate(x.shape) if i not in dimensions]),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, dimensions),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *arrays, dimension: np.concatenate(arrays, dimension),
    "round": rounded,
    "slice": lambda x, *, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "dynamic_slice": lambda x, *starts, slice_sizes: x[_starts(x, starts, slice_sizes)],
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "optimization_barrier": lambda *arrays, **_: list(arrays),
}

_NO_EFFECT = ("copy", "stop_gradient", "device_put", "sharding_constraint", "name", "pvary", "optimization_barrier")
# Parameters that change no number in float64, or that the dtype of the result shows.
_HINTS = ("accuracy", "precision", "sharding", "out_sharding", "weak_type", "is_stable", "out_dtype")
_HINTS += ("exponent_bits", "mantissa_bits")


def unknown_parameters(name: str, params: Mapping[str, Any]) -> list[str]:
    """The parameters of a primitive that are given and that its function here does not know."""
    known = _known(name)
    return [key for key, value in params.items() if value is not None and known and key not in known]


@cache
def _known(name: str) -> frozenset[str]:
    """Names of the parameters that are known; empty if all are."""
    function = None if name in _NO_EFFECT else PRIMITIVES.get(name)
    return frozenset() if function is None else frozenset((*inspect.signature(function).parameters, *_HINTS))


def read(primitive: str, params: Mapping[str, Any], *names: str) -> list[Any]:
    """Parameters of a primitive.

    Raises:
        CaptureError: this version of JAX does not have one of them.
    """
    missing = next((name for name in names if name not in params), None)
    if missing is not None:
        version = importlib.metadata.version("jax")
        remedy = "record the model with an older version (twinax capture)"
        raise CaptureError(f"{primitive} has no parameter {missing} in jax {version}; {remedy}")
    return [params[name] for name in names]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of `lax.scan`."""
    if "ft_in" in params:  # from jax 0.11 on
        constants, carried, _ = map(len, params["ft_in"].unpack())
        return constants, carried
    constants, carried = read("scan", params, "num_consts", "num_carry")
    return constants, carried


# Those whose results are views of their first input, or the numbers of it.
VIEWS = frozenset(
    (
        *(
            "reshape",
            "transpose",
            "squeeze",
            "expand_dims",
            "broadcast_in_dim",
            "slice",
            "dynamic_slice",
            "split",
            "rev",
        ),
        *("convert_element_type", "copy", "stop_gradient", "device_put", "sharding_constraint", "name", "pvary"),
    )
)
