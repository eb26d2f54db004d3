"""A user's own Adam or AdamW whose state dict stands beside the model's: `torch.save({"model": …, "optimizer": …})`.

`torch.optim` numbers parameters in the order of its groups and stores no names, unless it was given
`model.named_parameters()`. The order within a group is that of the state dict, which is the order of
`model.parameters()`. What divides two groups is assumed: the number of dimensions, or the names of biases and norms.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...backend.errors import ConfigError, ConversionError
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...flax_transformer.unused_parameters import without_gradient
from ...formulas.schedules import learning_rate
from ..arrays.lazy import Spec, specs_of
from ..checkpoint import MOMENTS, Checkpoint, Training
from ..formats.file_layouts import trained_rules
from ..port import flax_specs
from ..rules import Rule, target_specs, translate
from .torch_adam import Moments, check_settings, groups_of, moments_by_name, state_dict_of
from .trainer import check_model

Groups = tuple[list[str], ...]
_ADVICE = "pass named_parameters() to the optimizer, which then stores their names"
# The usual rules that divide parameters by weight decay: (name, shape) -> whether a parameter is decayed.
_RULES: dict[str, Callable[[str, tuple[int, ...]], bool]] = {
    "at least 2 dimensions, and the rest": lambda name, shape: len(shape) >= 2,
    "neither bias nor norm in the name, and the rest": lambda name, shape: not re.search("bias|norm", name.lower()),
}


def with_user_optimizer(
    checkpoint: Checkpoint, tensors: Mapping[str, np.ndarray], layout: str, state: Any, run: RunConfig
) -> Checkpoint:
    """The checkpoint of a file's tensors, in the file's order, with its optimizer's state, from which a run resumes.

    Raises:
        ConversionError: the model or the settings of the optimizer are not those of the run, or more than one order of
            the parameters is possible.
    """
    check_model(checkpoint.config, run.model)
    checkpoint = replace(checkpoint, config=run.model)
    specs, rules = flax_specs(run.model, trained_only=True), trained_rules(run.model, layout)
    rule_of = {target: rule for rule in rules for target in rule.target}
    shapes = {name: tuple(array.shape) for name, array in tensors.items()}
    names = _parameters(tensors, rule_of)
    groups = groups_of(state)
    order, assumed = order_of(groups, state["state"], [*names, *checkpoint.unused], names, shapes)
    untrained = without_gradient(run.model)
    absent = {*checkpoint.unused, *(n for n in names if {*rule_of[n].source} <= untrained)}
    flat = [name for group in order for name in group]
    moments = moments_by_name(state, flat, specs_of(tensors), absent)
    decays = [group["weight_decay"] for group in groups]
    for group, decay in zip(order, decays, strict=True):
        for name in group:
            _check_decay(name, decay, rule_of.get(name), run)
    check_settings(groups, decays, run.training)
    file_specs = target_specs(rules, specs)
    by_flax_name = (_by_flax_name(rules, arrays, file_specs) for arrays in moments[1:])
    update = moments.updates
    training = Training(run, update, run.training.seed, (0, update), update, *by_flax_name)
    notes = (assumed, _rate_note(groups, update, run))
    return replace(checkpoint, training=training, optimizer_notes=tuple(filter(None, notes)), skipped=())


def optimizer_entry(training: Training, config: TransformerConfig, layout: str) -> dict[str, Any]:
    """The state dict of the optimizer of a training, over the parameters of a file layout, in its order, with names."""
    rules, specs = trained_rules(config, layout), flax_specs(config, trained_only=True)
    arrays = [translate(rules, getattr(training, key), specs) for key in MOMENTS]
    decayed = {target: _is_decayed(rule, training.run) for rule in rules for target in rule.target}
    groups = [[name for name in arrays[0] if decayed[name] is is_decayed] for is_decayed in (True, False)]
    untrained = without_gradient(config)
    absent = {name for rule in rules for name in rule.target if {*rule.source} <= untrained}
    rate = float(learning_rate(training.update, training.run.training, config.d_model, np))
    moments, decays = Moments(training.count, *arrays), (training.run.training.weight_decay, 0.0)
    state = state_dict_of(groups, decays, moments, absent, training.run.training, {"lr": rate})
    groups_with_names = zip(state["param_groups"], groups, strict=True)
    return state | {"param_groups": [group | {"param_names": names} for group, names in groups_with_names]}


def moments_of_entry(
    state: Any, config: TransformerConfig, layout: str
) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(step count, means, means of squares), both by Flax name, from `optimizer_entry`. Raises: ConversionError."""
    rules = trained_rules(config, layout)
    specs = target_specs(rules, flax_specs(config, trained_only=True))
    names = [name for group in groups_of(state) for name in group.get("param_names", [])]
    if sorted(names) != sorted(specs):
        raise ConversionError("its optimizer has other parameters than its model")
    moments = moments_by_name(state, names, specs, {*specs})
    exp_avg, exp_avg_sq = (_by_flax_name(rules, arrays, specs) for arrays in moments[1:])
    return moments.updates, exp_avg, exp_avg_sq


def _by_flax_name(
    rules: Sequence[Rule], arrays: Mapping[str, np.ndarray], specs: Mapping[str, Spec]
) -> dict[str, np.ndarray]:
    """An optimizer's arrays of a file, by Flax name."""
    by_name = {n: a for rule in rules for n, a in _with_copies(rule, arrays, specs).items()}
    return translate([rule.inverse for rule in rules], by_name, specs)


def _parameters(tensors: Mapping[str, np.ndarray], rule_of: Mapping[str, Rule]) -> list[str]:
    """The names of the trained parameters, in the order of the state dict; of tied tensors the first."""
    names, rules = [], set()
    for name in tensors:
        rule = rule_of.get(name)
        if rule is not None and rule.source not in rules:
            names.append(name)
            rules.add(rule.source)
    return names


def order_of(
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[int, Any],
    all_names: Sequence[str],
    trained_names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Groups, str | None]:
    """(names per group, what was assumed about them).

    Raises:
        ConversionError: no usual order fits the shapes, or several do.
    """
    if all("param_names" in group for group in groups):
        return tuple([_suffix(name, shapes) for name in group["param_names"]] for group in groups), None
    candidates: dict[str, Groups] = {}
    in_file = [name for name in shapes if name in {*all_names}]
    for names in (in_file, list(trained_names)):
        if len(groups) == 1:
            candidates.setdefault("one group", (names,))
        for text, rule in _RULES.items() if len(groups) == 2 else ():
            first = [name for name in names if rule(name, shapes[name])]
            rest = [name for name in names if name not in first]
            candidates.setdefault(f"groups: {text}", (first, rest))
            candidates.setdefault(f"groups, in reverse: {text}", (rest, first))
        fitting = {text: order for text, order in candidates.items() if _fits(groups, entries, order, shapes)}
        if fitting:
            break
        candidates = {}
    else:
        counts = " and ".join(str(len(group["params"])) for group in groups)
        raise ConversionError(
            f"its optimizer has {counts} parameters, in no usual order of the model's {len(trained_names)}; {_ADVICE}"
        )
    orders = list(fitting.values())
    if any(order != orders[0] for order in orders):
        raise ConversionError(f"its optimizer's parameters fit {' as well as '.join(fitting)}; {_ADVICE}")
    return orders[0], f"its parameters are in the order of the state dict ({next(iter(fitting))})"


def _fits(
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[int, Any],
    order: Groups,
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether the numbers of parameters and the shapes of the moments are those of an order."""
    pairs = list(zip(groups, order, strict=True))
    if any(len(group["params"]) != len(names) for group, names in pairs):
        return False
    numbered = [pair for group, names in pairs for pair in zip(group["params"], names, strict=True)]
    moments = [(entries[i].get("exp_avg"), name) for i, name in numbered if i in entries]
    return all(moment is not None and tuple(moment.shape) == shapes[name] for moment, name in moments)


def _suffix(name: str, shapes: Mapping[str, Any]) -> str:
    """A parameter's name without the prefix of a wrapper, which the state dict's names have lost too."""
    parts = name.split(".")
    suffixes = (".".join(parts[i:]) for i in range(len(parts)))
    suffix = next((suffix for suffix in suffixes if suffix in shapes), None)
    if suffix is None:
        raise ConversionError(f"its optimizer has the parameter {name}, which the state dict lacks")
    return suffix


def _check_decay(name: str, decay: float, rule: Rule | None, run: RunConfig) -> None:
    """Raises: ConversionError if a run decays a parameter otherwise."""
    if rule is None:  # an unused array, which neither changes
        return
    expected = run.training.weight_decay if _is_decayed(rule, run) else 0.0
    if decay != expected:
        raise ConversionError(
            f"its optimizer has weight_decay={decay!r} for {name}, and the run has {expected!r}; set "
            "--training.weight-decay, and --training.decayed to matrices or all"
        )


def _is_decayed(rule: Rule, run: RunConfig) -> bool:
    """Whether a run decays the parameters of a rule."""
    return run.training.decayed == "all" or not rule.source[0].endswith((".scale", ".bias"))


def _with_copies(rule: Rule, arrays: Mapping[str, np.ndarray], specs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a rule's targets; copies of a tied tensor have the same, and one without a gradient zeros."""
    present = next((arrays[name] for name in rule.target if name in arrays), None)
    return {name: arrays.get(name, present) if present is not None else np.zeros(*specs[name]) for name in rule.target}


def _rate_note(groups: Sequence[Mapping[str, Any]], update: int, run: RunConfig) -> str | None:
    """What happens to the optimizer's learning rate, unless it is the run's."""
    try:
        rate = float(learning_rate(update, run.training, run.model.d_model, np))
    except ConfigError as error:
        raise ConversionError(str(error)) from None
    rates = {float(group["lr"]) for group in groups}
    if len(rates) == 1 and np.isclose(rates.pop(), rate, rtol=1e-9, atol=0):
        return None
    return f"its learning rate {float(groups[0]['lr']):.6g} is replaced by that of the run's schedule, {rate:.6g}"
