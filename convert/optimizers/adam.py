"""Conversion of Adam's state between optax and `torch.optim`: moments, step count and parameter groups.

The PyTorch model is the twin, or a user's own module around `torch.nn.Transformer`. Names, layouts and dtypes are
converted as for parameters. The parameter groups of `torch.optim` and the structure of optax's state are taken from an
existing optimizer with the same settings.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...backend.errors import ConversionError
from ...configs.run import RunConfig
from ...flax_transformer.unused_parameters import without_gradient
from ...formulas.schedules import learning_rate
from ..arrays.frameworks import from_torch, to_jax_arrays, to_torch_tensor
from ..arrays.lazy import Spec, specs_of
from ..checkpoint import MOMENTS, Training
from ..port import port_of
from ..rules import Translation, translate

_ENTRY = ("step", *MOMENTS)

if TYPE_CHECKING:
    import torch

    from ... import torch_reference


def to_optimizer_state(
    state: "optax.OptState | Training",
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    without_gradient: Collection[str] = (),
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The argument of `optimizer.load_state_dict`, for `torch.optim.Adam` or `AdamW` over the model's parameters.

    `state` is optax' state, or the training state of a checkpoint. `model` is a `torch_reference.Transformer`, or a
    module of `from_module`, with its `names`. `without_gradient`: Flax names of parameters without a gradient, which
    have no entry in `torch.optim`.

    Raises:
        ConversionError: the state or the optimizer is not Adam's, or the moments are not those of the model.
    """
    if isinstance(state, Training):
        count, moments = state.count, (state.exp_avg, state.exp_avg_sq)
    else:
        adam = find_adam(state)
        count, moments = int(np.asarray(adam.count)), (_by_name(adam.mu), _by_name(adam.nu))
    port = _port(model, specs_of(moments[0]), names)
    return _optimizer_state(count, moments, port, model, optimizer, without_gradient)


def to_optax_state(
    optimizer: "torch.optim.Optimizer",
    model: "torch.nn.Module",
    like: optax.OptState,
    without_gradient: Collection[str] = (),
    names: Mapping[str, str] | None = None,
) -> optax.OptState:
    """`like`, a new optax state with the same settings, with the moments and the step count of `optimizer`.

    `model` and `names` as in `to_optimizer_state`.

    Raises:
        ConversionError: the optimizer is not Adam, step counts differ between parameters, or a parameter with a
            gradient has no state while others have.
    """
    port = _port(model, specs_of(_by_name(find_adam(like).mu)), names)
    count, *moments = _moments(optimizer, port, model, without_gradient)
    return put_adam(like, count, *moments)


def _port(model: "torch.nn.Module", specs: Mapping[str, Spec], names: Mapping[str, str] | None) -> Translation:
    """The rules between the Flax names of trained parameters, of these specs, and the model's names."""
    from ...torch_reference.model import Transformer

    if isinstance(model, Transformer):
        return port_of(model.config, trained_only=True)
    from ..user_module import trained_translation

    return trained_translation(model, specs, names)


def put_adam(
    like: optax.OptState, count: int, exp_avg: Mapping[str, np.ndarray], exp_avg_sq: Mapping[str, np.ndarray]
) -> optax.OptState:
    """`like` with the moments and the count of its Adam state replaced by these."""
    old, moments = find_adam(like), (to_jax_arrays(exp_avg), to_jax_arrays(exp_avg_sq))
    new = optax.ScaleByAdamState(jnp.asarray(count, jnp.int32), *moments)
    return jax.tree.map(lambda node: new if node is old else node, like, is_leaf=lambda node: node is old)


def find_adam(state: optax.OptState) -> optax.ScaleByAdamState:
    """The Adam state within an optax state. Raises: ConversionError unless there is exactly one."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    states = [node for node in nodes if isinstance(node, optax.ScaleByAdamState)]
    if len(states) != 1:
        raise ConversionError(f"the optax state has {len(states)} states of Adam; one is needed")
    return states[0]


def to_torch_optimizer(training: Training, model: "torch_reference.Transformer") -> dict[str, Any]:
    """The state dict of a `torch.optim` optimizer that resumes a training."""
    from ...torch_reference.optimizers import make_optimizer

    config = training.run.training
    optimizer, moments = make_optimizer(model, config), (training.exp_avg, training.exp_avg_sq)
    for group in optimizer.param_groups:  # twinax's step overwrites it; for other steps, the rate of the next update
        group["lr"] = float(learning_rate(training.update, config, model.config.d_model, np))
    port = port_of(model.config, trained_only=True)
    return _optimizer_state(training.count, moments, port, model, optimizer, without_gradient(model.config))


def from_torch_optimizer(
    state: Mapping[str, Any], run: RunConfig, model: "torch_reference.Transformer"
) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(step count, means, means of squares), both by Flax name, from a state dict of `to_torch_optimizer`.

    Raises:
        ConversionError: it is not the state dict of the run's optimizer.
    """
    from ...torch_reference.optimizers import make_optimizer

    optimizer = make_optimizer(model, run.training)
    try:
        optimizer.load_state_dict(dict(state))
        return _moments(optimizer, port_of(model.config, trained_only=True), model, without_gradient(model.config))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConversionError(f"its optimizer is not that of the run: {error}") from None


def _optimizer_state(
    count: int,
    moments: tuple[Mapping[str, Any], Mapping[str, Any]],
    port: Translation,
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    without_gradient: Collection[str],
) -> dict[str, Any]:
    import torch

    names, entries = _names(model, optimizer), {}
    absent = _absent(port, without_gradient)
    mu, nu = (translate(port.rules, {n: np.asarray(a) for n, a in arrays.items()}, port.specs) for arrays in moments)
    for index, name in names.items():
        if count and name not in absent:  # torch creates entries at the first update
            step = torch.tensor(float(count), dtype=torch.float32)
            arrays = {"exp_avg": mu[name], "exp_avg_sq": nu[name]}
            entries[index] = {"step": step} | {key: to_torch_tensor(array) for key, array in arrays.items()}
    return {**optimizer.state_dict(), "state": entries}


def _moments(
    optimizer: "torch.optim.Optimizer",
    port: Translation,
    model: "torch.nn.Module",
    without_gradient: Collection[str],
) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
    names, entries = _names(model, optimizer), optimizer.state_dict()["state"]
    steps = {int(entry["step"]) for entry in entries.values()}
    if len(steps) > 1:
        raise ConversionError(f"the parameters have different step counts, {sorted(steps)}; optax has only one")
    absent = _absent(port, without_gradient)
    missing = [name for index, name in names.items() if index not in entries and name not in absent]
    if entries and missing:
        raise ConversionError(
            f"{len(missing)} parameters have no state while others have: {', '.join(missing)}; "
            "if they have no gradient, pass their Flax names as without_gradient"
        )
    zeros = {name: from_torch(p.new_zeros(p.shape)) for name, p in model.named_parameters()}
    moments = (zeros | {names[i]: from_torch(entry[key]) for i, entry in entries.items()} for key in MOMENTS)
    exp_avg, exp_avg_sq = (translate(port.inverses, arrays, port.target_specs) for arrays in moments)
    return max(steps, default=0), exp_avg, exp_avg_sq


def _absent(port: Translation, without_gradient: Collection[str]) -> set[str]:
    """The PyTorch names of parameters without a gradient."""
    return {name for rule in port.rules for name in rule.target if {*rule.source} <= {*without_gradient}}


def _names(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> dict[int, str]:
    """The model's parameter names, by index in the optimizer's `state_dict`."""
    _check_optimizer(optimizer)
    by_identity = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if sorted(map(id, parameters)) != sorted(by_identity):
        raise ConversionError("the optimizer must hold each of the model's parameters exactly once")
    return {index: by_identity[id(p)] for index, p in enumerate(parameters)}


def _check_optimizer(optimizer: "torch.optim.Optimizer") -> None:
    """Raises: ConversionError if its state or its update rule differs from optax' Adam."""
    import torch

    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConversionError(f"the optimizer is {kind.__name__}; torch.optim.Adam or AdamW is needed")
    for name in ("amsgrad", "maximize"):
        if any(group[name] for group in optimizer.param_groups):
            raise ConversionError(f"the optimizer has {name}=True, which optax' Adam does not have")
    for entry in optimizer.state.values():
        if set(entry) != set(_ENTRY):
            keys = ", ".join(map(str, entry)) or "nothing"
            raise ConversionError(f"the optimizer's state of a parameter has {keys}; {', '.join(_ENTRY)} are needed")


def _by_name(moments: Any) -> Mapping[str, Any]:
    if not isinstance(moments, Mapping):
        raise ConversionError(f"the moments are a {type(moments).__name__}; arrays by name are needed")
    return moments
