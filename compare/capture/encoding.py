"""Settings and inputs as JSON and back: numbers, texts, tuples, arrays, and small classes of PyTorch and JAX.

What is not one of these becomes a text when it is read, so that reading cannot run code.
"""

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_TORCH = ("dtype", "device", "layout", "memory_format")
_LONGEST = 80  # characters of a text that stands for something else

Store = Callable[[np.ndarray], Any]  # an array -> its description
Load = Callable[[Any], np.ndarray]


@dataclass(frozen=True)
class Other:
    """What a file cannot hold, such as a function; `text` shows it."""

    text: str


def is_complete(value: Any) -> bool:
    """Whether nothing in it was left out."""
    if isinstance(value, Mapping):
        return all(map(is_complete, value.values()))
    return all(map(is_complete, value)) if isinstance(value, (list, tuple)) else not isinstance(value, Other)


def encoded(value: Any, store: Store) -> Any:
    """A value for JSON; arrays are what `store` returns for them."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return {"other": repr(value)[:_LONGEST]}
        return {"mapping": {key: encoded(entry, store) for key, entry in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encoded(part, store) for part in (value.start, value.stop, value.step)]}
    known = _of_framework(value, store)
    if known is not None:
        return known
    if isinstance(value, tuple):
        return {"tuple": [encoded(entry, store) for entry in value]}
    if isinstance(value, list):
        return [encoded(entry, store) for entry in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"dtype": np.dtype(value).name}
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return {"array": store(_array(value))}
    return {"other": repr(value)[:_LONGEST]}


def _of_framework(value: Any, store: Store) -> dict[str, Any] | None:
    """An object of one of the small classes of PyTorch and JAX; None of any other."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in _TORCH:
        return {"torch": str(value).removeprefix("torch."), "kind": kind.__name__}
    if kind.__module__.partition(".")[0] != "jax" or kind is not _jax_class(kind.__name__):
        return None
    if isinstance(value, enum.Enum):
        return {"jax": kind.__name__, "member": value.name}
    if isinstance(value, tuple):
        return {"jax": kind.__name__, "fields": [encoded(entry, store) for entry in value]}
    return None


def _jax_class(name: str) -> Any:
    """A class of settings that `jax.lax` has under this name."""
    lax = getattr(sys.modules.get("jax"), "lax", None)
    kind = getattr(lax, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, (enum.Enum, tuple)) else None


def _array(value: Any) -> np.ndarray:
    if type(value).__module__.partition(".")[0] == "torch":
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def decoded(value: Any, load: Load) -> Any:
    """The value of a JSON that `encoded` made.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(value, list):
        return [decoded(entry, load) for entry in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "mapping":
        return {key: decoded(entry, load) for key, entry in content.items()}
    if kind == "tuple":
        return tuple(decoded(entry, load) for entry in content)
    if kind == "slice":
        return slice(*(decoded(part, load) for part in content))
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*map(float, content))
    if kind == "array":
        return load(content)
    if kind == "dtype":
        return np.dtype(content) if content in np.sctypeDict else _jax_dtype(content)
    if kind == "torch":
        return _of_torch(content, value["kind"])
    if kind == "jax":
        return _of_jax(value, load)
    if kind == "other":
        return Other(str(content))
    raise ValueError(f"{kind} is not a kind of setting")


def _jax_dtype(name: str) -> Any:
    """A dtype that NumPy alone does not have, such as bfloat16."""
    jax = sys.modules.get("jax")
    try:
        return Other(name) if jax is None else jax.numpy.dtype(name)
    except TypeError:
        return Other(name)


def _of_torch(name: str, kind: str) -> Any:
    """A dtype, device or layout of PyTorch; a text where PyTorch is not installed."""
    torch = sys.modules.get("torch")
    if torch is None or kind not in _TORCH:
        return Other(name)
    if kind == "device":
        return torch.device("cpu")
    found = getattr(torch, name, None)
    return found if isinstance(found, getattr(torch, kind)) else Other(name)


def _of_jax(value: dict[str, Any], load: Load) -> Any:
    kind = _jax_class(str(value["jax"]))
    if kind is None:
        return Other(str(value["jax"]))
    if issubclass(kind, enum.Enum):
        return kind[value["member"]] if value.get("member") in kind.__members__ else Other(str(value["member"]))
    fields = [decoded(entry, load) for entry in value["fields"]]
    return kind(*fields) if len(fields) == len(getattr(kind, "_fields", ())) else Other(str(value["jax"]))
