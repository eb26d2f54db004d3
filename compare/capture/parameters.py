"""The parameters of a model by the names that they have in its trace, and a copy of it with others."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from .models import is_torch
from .recording import Recording
from .trace import CaptureError, dotted, named


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    """The parameters and buffers of any model that `diagnose` takes, by the names that they have in its trace."""
    if isinstance(model, Recording):
        return model.arrays
    if is_torch(model):
        if isinstance(model, tuple):
            return {name: _of_tensor(leaf) for name, leaf in named(model[1])}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: _of_tensor(tensor) for name, tensor in tensors}
    import jax

    from .jax_models import as_function

    leaves = jax.tree_util.tree_leaves_with_path(as_function(model)[1])
    return {dotted(path): np.asarray(leaf) for path, leaf in leaves}


def _of_tensor(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def with_arrays(model: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """A copy of a model with these parameters; those that are not named keep their values.

    Raises:
        CaptureError: a name or a shape is not one of the model's.
    """
    own = arrays_of(model)
    for name, array in arrays.items():
        if name not in own:
            raise CaptureError(f"{name}: the candidate has no such parameter; it has {', '.join(list(own)[:4])}, …")
        if own[name].shape != array.shape:
            raise CaptureError(
                f"{name}: the converter returns shape {array.shape}, the candidate has {own[name].shape}"
            )
    if isinstance(model, Recording):
        return model.with_arrays(arrays)
    if is_torch(model):
        return _torch_with_arrays(model, arrays)
    import jax

    from .jax_models import as_function

    function, parameters = as_function(model)
    return function, jax.tree_util.tree_map_with_path(lambda p, old: arrays.get(dotted(p), old), parameters)


def _torch_with_arrays(model: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    import torch
    from torch.utils._pytree import tree_map_with_path

    if isinstance(model, torch.nn.Module):
        loaded = copy.deepcopy(model)
        tensors = dict(loaded.named_parameters(remove_duplicate=False)) | dict(loaded.named_buffers())
        with torch.no_grad():
            for name, array in arrays.items():
                tensors[name].copy_(torch.from_numpy(np.array(array)))
        return loaded

    def leaf(path: Any, old: Any) -> Any:
        new = arrays.get(dotted(path))
        return old if new is None else torch.as_tensor(new)

    return model[0], tree_map_with_path(leaf, model[1])
