"""Bit-exact conversion between the arrays of either framework and numpy arrays, without shared memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..configs.errors import ConversionError

if TYPE_CHECKING:
    import torch


def from_torch(tensor: "torch.Tensor") -> np.ndarray:
    """A copy of a tensor; bfloat16, which numpy lacks, becomes `ml_dtypes.bfloat16`, as in JAX."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy())


def to_torch_tensor(array: np.ndarray) -> "torch.Tensor":
    """A tensor that holds a copy of the array."""
    import torch

    copy = np.array(array, order="C")
    if copy.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def to_jax_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """JAX arrays that hold copies of these arrays.

    Raises:
        ConversionError: JAX would convert float64 to float32, because `jax_enable_x64` is off.
    """
    import jax.numpy as jnp

    from ..flax_transformer.inputs import float64_is_on

    names = [name for name, a in arrays.items() if a.dtype == np.float64]
    if names and not float64_is_on():
        raise ConversionError(
            f"{len(names)} arrays are float64, which JAX would convert to float32: call "
            "jax.config.update('jax_enable_x64', True) first, use `with jax.enable_x64(True):`, or set JAX_ENABLE_X64=1"
        )
    return {name: jnp.array(a, copy=True) for name, a in arrays.items()}
