"""What wrappers of models and training programs put around names of arrays and around state dicts."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ..checkpoint import Checkpoint

# Components of names, anywhere: of torch.compile; DataParallel, DDP and DeepSpeed; FSDP, also of older versions;
# activation checkpointing; Lightning Fabric.
_COMPONENTS = "_orig_mod module _fsdp_wrapped_module _fpw_module _checkpoint_wrapped_module _forward_module"
_WRAPPED = re.compile(rf"(?<![^.])(?:{'|'.join(_COMPONENTS.split())})\.")
_PREFIX = "model."  # of Lightning and many training programs
# Usual keys of a state dict in a larger dict; Lightning's is state_dict, DeepSpeed's is module.
_KEYS = ("model", "state_dict", "model_state_dict", "module")


def state_dict_of(content: Any) -> tuple[Any, tuple[str, ...]]:
    """(the state dict in the content of a file, the names of the entries beside it)."""
    key = next((n for n in _KEYS if isinstance(content, dict) and isinstance(content.get(n), dict)), None)
    if key is None:
        return content, ()
    return content[key], tuple(str(name) for name in content if name != key)


def unwrap(
    arrays: Mapping[str, np.ndarray], known: Collection[str] = ()
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """(arrays under the names of the model itself, the parts of names that were removed).

    `known`: names of the model, of which the arrays have at least one; what stands before it is a prefix of all names.

    Raises:
        ConversionError: two arrays have one name, or only some arrays have the prefix.
    """
    parts = dict.fromkeys(part for name in arrays for part in _WRAPPED.findall(name))
    unwrapped = {_WRAPPED.sub("", name): array for name, array in arrays.items()}
    if len(unwrapped) < len(arrays):
        raise ConversionError(f"two arrays have one name without {', '.join(parts)}; save the model without wrappers")
    while prefix := _prefix_of(unwrapped, known):
        if others := [name for name in unwrapped if not name.startswith(prefix)]:
            raise ConversionError(
                f"holds {len(unwrapped) - len(others)} arrays of a model, {prefix}*, and {len(others)} others, such as "
                f"{others[0]}; save the state dict of the model alone"
            )
        parts[prefix] = None
        unwrapped = {name.removeprefix(prefix): array for name, array in unwrapped.items()}
    return unwrapped, tuple(parts)


def _prefix_of(names: Collection[str], known: Collection[str]) -> str:
    """The prefix of all names; empty if there is none."""
    if not known:
        return _PREFIX if names and all(name.startswith(_PREFIX) for name in names) else ""
    if any(name in known for name in names):
        return ""
    ends = ((name, end) for end in sorted(known, key=len, reverse=True) for name in names if name.endswith(f".{end}"))
    return next((name.removesuffix(end) for name, end in ends), "")


def describe_stripped(name: str, checkpoint: Checkpoint) -> str:
    """One line on the parts of names that were removed."""
    parts = ", ".join(checkpoint.stripped)
    return f"{name}: removed {parts} from the names of its arrays, as torch.compile, DDP, FSDP or Lightning add them"
