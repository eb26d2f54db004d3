"""Reading of the weights that the Flax classes of `transformers` 4 saved, which version 5 can no longer read.

A file is a tree of arrays, such as {"model": {"shared": {"embedding": …}}}. An array's path differs from its name in
the PyTorch class, `model.shared.weight`, in the last part only, so the layouts of the families read these files too.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax import serialization, traverse_util

from ...backend.errors import ConversionError
from ..port import LEAVES
from ..rules import IDENTITY

WEIGHTS = "flax_model.msgpack"
# The Flax classes have one embedding table, whatever the settings; an untied PyTorch class has three.
_SHARED = "shared.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def read_msgpack(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, by their path joined by slashes, as an index names them; executes no code.

    Raises:
        ConversionError: the file is damaged, or holds more than arrays.
    """
    try:
        tree = serialization.msgpack_restore(path.read_bytes())
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ConversionError(f"{path}: not a complete Flax file: {reason}") from None
    if not isinstance(tree, dict):
        raise ConversionError(f"{path}: holds a {type(tree).__name__}, not a tree of arrays")
    arrays = {}
    for keys, array in traverse_util.flatten_dict(tree).items():
        if not all(isinstance(key, str) for key in keys):
            raise ConversionError(f"{path}: the path {keys!r} has a part that is not text")
        name = "/".join(keys)
        if not isinstance(array, np.ndarray):
            raise ConversionError(f"{path}: {name} is a {type(array).__name__}, not an array")
        if name in arrays:
            raise ConversionError(f"{path}: holds {name} twice")
        arrays[name] = array
    return arrays


def to_torch_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays under the names and in the shapes of the PyTorch class; paths have slashes or dots.

    Raises:
        ConversionError: two arrays get the same name.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, array in arrays.items():
        *modules, leaf = path.replace("/", ".").split(".")
        torch_leaf, transform = LEAVES.get(leaf, (leaf, IDENTITY))
        name = ".".join((*modules, torch_leaf))
        if name in tensors:
            raise ConversionError(f"{path}: is a second array for {name}")
        (tensors[name],) = transform.forward([array])
    for name in [name for name in tensors if name.endswith(_SHARED)]:
        for copy in _COPIES:
            tensors.setdefault(name.removesuffix(_SHARED) + copy, tensors[name])
    return tensors
