"""Bit-exact conversion between the arrays of either framework and numpy arrays, without shared memory."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ...backend.errors import ConversionError
from .lazy import LazyArrays, Spec, specs_of

if TYPE_CHECKING:
    import torch


def from_torch(tensor: "torch.Tensor") -> np.ndarray:
    """A copy of a tensor; bfloat16, which numpy lacks, becomes `ml_dtypes.bfloat16`, as in JAX."""
    return np.array(view_of_torch(tensor))


def view_of_torch(tensor: "torch.Tensor") -> np.ndarray:
    """A view of a tensor on the CPU, with the dtypes of `from_torch`."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch_tensor(array: np.ndarray) -> "torch.Tensor":
    """A tensor that holds a copy of the array."""
    return torch_view(np.array(array, order="C"))


def torch_view(array: np.ndarray) -> "torch.Tensor":
    """A tensor in C order that is a view of the array if possible; it must not be written to."""
    import torch

    array = np.ascontiguousarray(array)
    with warnings.catch_warnings(action="ignore"):  # a read-only array becomes a tensor that torch could write to
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def cast(arrays: Mapping[str, np.ndarray], dtype: str) -> LazyArrays:
    """The arrays in another floating-point dtype, each converted when it is read: rounded to nearest, ties to even.

    Raises:
        ConversionError: on reading, a number is beyond the range of the dtype.
    """
    specs = {name: Spec(spec.shape, dtype) for name, spec in specs_of(arrays).items()}
    return LazyArrays(specs, lambda name: _cast(name, arrays[name], np.dtype(dtype)))


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        if array.dtype == np.float64 and dtype == ml_dtypes.bfloat16:
            array = _to_odd(array)  # ml_dtypes converts through float32, which would round twice
        result = array.astype(dtype, copy=False)
    if result is not array and not np.isfinite(result).all():
        overflow = np.isfinite(array) & ~np.isfinite(result)
        if overflow.any():
            value = array[overflow].flat[0]
            raise ConversionError(f"{name}: holds {value:g}, which is beyond the range of {dtype}")
    return result


def _to_odd(array: np.ndarray) -> np.ndarray:
    """float64 to float32, where an inexact number becomes the neighbor with an odd last bit.

    A second rounding, to a format shorter by two bits or more, is then that of the first number.
    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008, theorem 3.
    """
    rounded = array.astype(np.float32)
    inexact = (rounded != array) & np.isfinite(array)
    beyond = inexact & (np.abs(rounded) > np.abs(array))
    truncated = np.where(beyond, np.nextafter(rounded, np.float32(0)), rounded)
    odd = (truncated.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(inexact, odd, rounded)


def to_jax_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """JAX arrays that hold copies of these arrays.

    Raises:
        ConversionError: JAX would convert float64 to float32, because `jax_enable_x64` is off.
    """
    import jax.numpy as jnp

    from ...flax_transformer.inputs import float64_is_on

    names = [name for name, a in arrays.items() if a.dtype == np.float64]
    if names and not float64_is_on():
        raise ConversionError(
            f"{len(names)} arrays are float64, which JAX would convert to float32: call "
            "jax.config.update('jax_enable_x64', True) first, use `with jax.enable_x64(True):`, or set JAX_ENABLE_X64=1"
        )
    return {name: jnp.array(a, copy=True) for name, a in arrays.items()}
