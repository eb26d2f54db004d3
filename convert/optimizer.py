"""The state of Adam between optax and `torch.optim`: moments, number of updates, groups of parameters.

Names, layouts and dtypes are those of the parameters' port. What `torch.optim` keeps besides, the groups with
their settings, comes from an optimiser of the same settings; so does the shape of optax's state.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..configs.errors import ConversionError
from ..configs.run import RunConfig
from ..flax_transformer.unused_parameters import without_gradient
from ..formulas.schedules import learning_rate
from .arrays import to_jax_arrays
from .checkpoint import MOMENTS, Training
from .port import flax_specs, port_rules, to_params, to_state_dict

_ENTRY = ("step", *MOMENTS)

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
    adam = find_adam(state)
    moments = (_by_name(adam.mu), _by_name(adam.nu))
    return _optimizer_state(int(np.asarray(adam.count)), moments, model, optimizer, without_gradient)


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
    count, *moments = _moments(optimizer, model, without_gradient)
    return put_adam(like, count, *moments)


def put_adam(
    like: optax.OptState, count: int, exp_avg: Mapping[str, np.ndarray], exp_avg_sq: Mapping[str, np.ndarray]
) -> optax.OptState:
    """`like` with these moments and this count for those of its state of Adam."""
    old, moments = find_adam(like), (to_jax_arrays(exp_avg), to_jax_arrays(exp_avg_sq))
    new = optax.ScaleByAdamState(jnp.asarray(count, jnp.int32), *moments)
    return jax.tree.map(lambda node: new if node is old else node, like, is_leaf=lambda node: node is old)


def find_adam(state: optax.OptState) -> optax.ScaleByAdamState:
    """The state of Adam within an optimiser's. Raises: ConversionError where there is not one."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    found = [node for node in nodes if isinstance(node, optax.ScaleByAdamState)]
    if len(found) != 1:
        raise ConversionError(f"the optax state has {len(found)} states of Adam; one is needed")
    return found[0]


def to_torch_optimizer(training: Training, model: "torch_reference.Transformer") -> dict[str, Any]:
    """The state of the `torch.optim` optimiser that goes on where a training stands."""
    from ..torch_reference.optimizers import make_optimizer

    config = training.run.training
    optimizer, moments = make_optimizer(model, config), (training.exp_avg, training.exp_avg_sq)
    for group in optimizer.param_groups:  # our step sets it; whoever writes another finds the rate of the next update
        group["lr"] = float(learning_rate(training.update, config, model.config.d_model, np))
    return _optimizer_state(training.count, moments, model, optimizer, without_gradient(model.config))


def from_torch_optimizer(
    state: Mapping[str, Any], run: RunConfig, model: "torch_reference.Transformer"
) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(updates, means, means of squares) by Flax name of what `to_torch_optimizer` returns.

    Raises:
        ConversionError: it is not the state of the run's optimiser.
    """
    from ..torch_reference.optimizers import make_optimizer

    optimizer = make_optimizer(model, run.training)
    try:
        optimizer.load_state_dict(dict(state))
        return _moments(optimizer, model, without_gradient(model.config))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConversionError(f"its optimizer is not that of the run: {error}") from None


def _optimizer_state(
    count: int,
    moments: tuple[Mapping[str, Any], Mapping[str, Any]],
    model: "torch_reference.Transformer",
    optimizer: "torch.optim.Optimizer",
    without_gradient: Collection[str],
) -> dict[str, Any]:
    import torch

    names, entries = _names(model, optimizer), {}
    mu, nu = (to_state_dict(arrays, model.config, trained_only=True) for arrays in moments)
    for index, name in names.items():
        if count and _flax_names(model)[name] not in without_gradient:  # torch's first update makes them
            step = torch.tensor(float(count), dtype=torch.float32)
            entries[index] = {"step": step, "exp_avg": mu[name], "exp_avg_sq": nu[name]}
    return {**optimizer.state_dict(), "state": entries}


def _moments(
    optimizer: "torch.optim.Optimizer", model: "torch_reference.Transformer", without_gradient: Collection[str]
) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
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
    found = (zeros | {names[i]: entry[key] for i, entry in entries.items()} for key in MOMENTS)
    exp_avg, exp_avg_sq = (to_params(tensors, model.config, trained_only=True) for tensors in found)
    return max(steps, default=0), exp_avg, exp_avg_sq


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
