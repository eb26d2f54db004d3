"""The state of Adam between optax and `torch.optim`: moments, number of updates, groups of parameters.

Names, layouts and number types are those of the parameters' port. What `torch.optim` keeps besides, the groups with
their settings, comes from an optimiser of the same settings; so does the shape of optax's state.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .arrays import to_jax_arrays
from .port import flax_specs, port_rules, to_params, to_state_dict
from .rules import ConversionError

_ENTRY = ("step", "exp_avg", "exp_avg_sq")

if TYPE_CHECKING:
    import torch

    from .. import torch_reference


def to_optimizer_state(
    state: optax.OptState,
    model: "torch_reference.Transformer",
    optimizer: "torch.optim.Optimizer",
    without_gradient: Collection[str] = (),
) -> dict[str, Any]:
    """What `load_state_dict` takes of `optimizer`, which is `torch.optim.Adam` or `AdamW` of the model's parameters.

    `without_gradient`: Flax names of parameters that the loss does not reach; `torch.optim` has no entry for these.

    Raises:
        ConversionError: the state or the optimiser is not Adam's, or the moments are not those of the model.
    """
    import torch

    adam, names = _adam(state), _names(model, optimizer)
    mu, nu = (to_state_dict(_by_name(moments), model.config, trained_only=True) for moments in (adam.mu, adam.nu))
    count, entries = int(np.asarray(adam.count)), {}
    for index, name in names.items():
        if count and _flax_names(model)[name] not in without_gradient:  # torch's first update makes them
            step = torch.tensor(float(count), dtype=torch.float32)
            entries[index] = {"step": step, "exp_avg": mu[name], "exp_avg_sq": nu[name]}
    return {**optimizer.state_dict(), "state": entries}


def to_optax_state(
    optimizer: "torch.optim.Optimizer",
    model: "torch_reference.Transformer",
    like: optax.OptState,
    without_gradient: Collection[str] = (),
) -> optax.OptState:
    """`like`, a new state of the same settings in optax, with the moments and the count of `optimizer`.

    Raises:
        ConversionError: the optimiser is not Adam; parameters have had different numbers of updates, or one that the
            loss reaches has had none while others have.
    """
    names, entries = _names(model, optimizer), optimizer.state_dict()["state"]
    steps = {int(entry["step"]) for entry in entries.values()}
    if len(steps) > 1:
        raise ConversionError(f"the parameters have had different numbers of updates, {sorted(steps)}; optax has one")
    missing = [n for i, n in names.items() if i not in entries and _flax_names(model)[n] not in without_gradient]
    if entries and missing:
        raise ConversionError(
            f"{len(missing)} parameters have no state while others have: {', '.join(missing)}; "
            "where the loss does not reach them, give their Flax names as without_gradient"
        )
    zeros = {name: p.new_zeros(p.shape) for name, p in model.named_parameters()}
    moments = []
    for key in ("exp_avg", "exp_avg_sq"):
        found = zeros | {names[index]: entry[key] for index, entry in entries.items()}
        moments.append(to_jax_arrays(to_params(found, model.config, trained_only=True)))
    old, new = _adam(like), optax.ScaleByAdamState(jnp.asarray(max(steps, default=0), jnp.int32), *moments)
    return jax.tree.map(lambda node: new if node is old else node, like, is_leaf=lambda node: node is old)


def _adam(state: optax.OptState) -> optax.ScaleByAdamState:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    found = [node for node in nodes if isinstance(node, optax.ScaleByAdamState)]
    if len(found) != 1:
        raise ConversionError(f"the optax state has {len(found)} states of Adam; one is needed")
    return found[0]


def _names(model: "torch_reference.Transformer", optimizer: "torch.optim.Optimizer") -> dict[int, str]:
    """The model's name of every parameter, by its number in the optimiser's `state_dict`."""
    _check_optimizer(optimizer)
    by_identity = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if sorted(map(id, parameters)) != sorted(by_identity):
        raise ConversionError("the optimiser's parameters are not those of the model, each once")
    return {index: by_identity[id(p)] for index, p in enumerate(parameters)}


def _check_optimizer(optimizer: "torch.optim.Optimizer") -> None:
    """Raises: ConversionError where it keeps another state than optax' Adam, or goes another way with it."""
    import torch

    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConversionError(f"the optimiser is {kind.__name__}; torch.optim.Adam or AdamW is needed")
    for name in ("amsgrad", "maximize"):
        if any(group[name] for group in optimizer.param_groups):
            raise ConversionError(f"the optimiser has {name}=True, which optax' Adam does not have")
    for entry in optimizer.state.values():
        if set(entry) != set(_ENTRY):
            found = ", ".join(map(str, entry)) or "nothing"
            raise ConversionError(f"the optimiser keeps {found} for a parameter; {', '.join(_ENTRY)} are needed")


def _flax_names(model: "torch_reference.Transformer") -> dict[str, str]:
    rules = port_rules(flax_specs(model.config, trained_only=True))
    return {rule.target[0]: rule.source[0] for rule in rules}


def _by_name(moments: Any) -> Mapping[str, Any]:
    if not isinstance(moments, Mapping):
        raise ConversionError(f"the moments are a {type(moments).__name__}; arrays by name are needed")
    return moments
