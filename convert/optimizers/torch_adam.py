"""State dicts of `torch.optim.Adam` and `AdamW` that other programs saved: moments by parameter name, and settings."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...backend.errors import ConversionError
from ...configs.training import TrainingConfig
from ..arrays.frameworks import from_torch, to_torch_tensor
from ..arrays.lazy import Spec
from ..checkpoint import MOMENTS
from ..identify.unreadable import printable
from ..rules import text_of

_ENTRY = ("step", *MOMENTS)
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad")  # the last one distinguishes Adam from RAdam and others


class Moments(NamedTuple):
    """The state of Adam; arrays by the names that the model's file has."""

    updates: int
    exp_avg: dict[str, np.ndarray]
    exp_avg_sq: dict[str, np.ndarray]


def groups_of(state: Any) -> list[Mapping[str, Any]]:
    """The parameter groups of a state dict. Raises: ConversionError if it is not of `torch.optim`'s Adam or AdamW."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping) or not groups:
        raise ConversionError("is not the state dict of an optimizer of torch.optim")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        raise ConversionError("has parameter groups without a list of parameters")
    if missing := [name for group in groups for name in _SETTINGS if name not in group]:
        raise ConversionError(f"has parameter groups without {missing[0]}; those of Adam and AdamW have it")
    if len(ids := [i for group in groups for i in group["params"]]) != len({*ids}) or not {*state["state"]} <= {*ids}:
        raise ConversionError("has parameter groups that do not match its state")
    return groups


def moments_by_name(
    state: Mapping[str, Any], names: Sequence[str], specs: Mapping[str, Spec], absent: Collection[str]
) -> Moments:
    """The moments of a state dict whose parameters have these names, in this order.

    `absent`: parameters without a gradient, of which `torch.optim` has no state.

    Raises:
        ConversionError: it is not Adam's, has other parameters, shapes or dtypes, or parameters with different step
            counts.
    """
    ids = [i for group in groups_of(state) for i in group["params"]]
    if len(ids) != len(names):
        raise ConversionError(f"has {len(ids)} parameters, and the model has {len(names)}")
    entries = {name: state["state"][i] for i, name in zip(ids, names, strict=True) if i in state["state"]}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or {*entry} != {*_ENTRY}:
            keys = printable(", ".join(map(str, entry)) if isinstance(entry, Mapping) else entry)
            raise ConversionError(f"has {keys} for {name}; Adam has {', '.join(_ENTRY)}")
        for key in MOMENTS:
            moment = Spec(tuple(entry[key].shape), str(entry[key].dtype).removeprefix("torch."))
            if moment != specs[name]:
                raise ConversionError(f"has {key} {text_of(moment)} for {name}, which is {text_of(specs[name])}")
    counts = {int(entry["step"]) for entry in entries.values()}
    if len(counts) > 1:
        raise ConversionError(f"has parameters with different step counts, {sorted(counts)}; twinax has one count")
    missing = [name for name in names if name not in entries and name not in absent]
    if entries and missing:
        raise ConversionError(f"has no state of {len(missing)} parameters: {', '.join(missing[:3])}")
    first, second = ({name: from_torch(entry[key]) for name, entry in entries.items()} for key in MOMENTS)
    return Moments(max(counts, default=0), first, second)


def state_dict_of(
    groups: Sequence[Sequence[str]],
    decays: Sequence[float],
    moments: Moments,
    absent: Collection[str],
    training: TrainingConfig,
    rates: Mapping[str, float],
) -> dict[str, Any]:
    """The state dict of a new Adam or AdamW over groups of parameters with these names.

    `absent` parameters have no state; `rates` are the groups' learning rates, by their keys.
    """
    import torch

    entries, names = {}, [name for group in groups for name in group]
    for index, name in enumerate(names):
        if moments.updates and name not in absent:  # torch creates entries at the first update
            entries[index] = {"step": torch.tensor(float(moments.updates), dtype=torch.float32)}
            entries[index] |= {key: to_torch_tensor(getattr(moments, key)[name]) for key in MOMENTS}
    parameters = [[torch.nn.Parameter(torch.empty(0)) for _ in group] for group in groups]
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer]
    optimizer = kind(
        [{"params": group, "weight_decay": decay} for group, decay in zip(parameters, decays, strict=True)],
        lr=0.0, betas=(training.beta1, training.beta2), eps=training.eps,
    )  # fmt: skip
    return {"state": entries, "param_groups": [group | rates for group in optimizer.state_dict()["param_groups"]]}


def check_settings(groups: Sequence[Mapping[str, Any]], decays: Sequence[float], training: TrainingConfig) -> None:
    """Raises: ConversionError if the groups' settings are not a run's; `decays` is the weight decay per group."""
    problems = []
    for group, decay in zip(groups, decays, strict=True):
        beta1, beta2 = group["betas"]
        pairs = {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        if group["weight_decay"] != decay:
            pairs["weight_decay"] = group["weight_decay"]
        elif decay and group.get("decoupled_weight_decay") is not None:
            pairs["optimizer"] = "adamw" if group["decoupled_weight_decay"] else "adam"
        for name, value in pairs.items():
            expected = getattr(training, name) if name != "weight_decay" else decay
            if value != expected:
                flag = f"--training.{name.replace('_', '-')}"
                problems.append(f"{name}={value!r}, and the run has {expected!r} ({flag})")
        problems += [f"{name}=True, which twinax does not have" for name in ("amsgrad", "maximize") if group.get(name)]
    if problems:
        raise ConversionError(f"has {'; '.join(dict.fromkeys(problems))}")
