"""Defects in optimizers: optax transformations with one mistake beside the torch optimizer that they should equal."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optax
import torch

from benchmarks.external_pairs.forward import Checked
from benchmarks.external_pairs.scores import Score, by_operator, report, sample
from twinax.compare.training.updates import compare_updates, update_of

Array = np.ndarray
Settings = Mapping[str, Any]
CRITERIA = ("1 update, atol 1e-04", "10 updates, atol 1e-04", "10 updates, cosine 0.999")
_PAIRS = (
    "Equinox MLP",
    "Linen encoder layer, pre-norm",
    "d2l_note",
    "twins",
    "transformers BART",
    "Linen convolutions",
)
_RATE = 1e-2
# What an optimizer is made of; a mistake changes one of these. "exempt": parameters with one axis have no decay.
_COMMON = {"rate": _RATE, "decay": 0.0, "coupled": False, "exempt": False, "clip": 0.0, "frozen": "", "schedule": False}
_ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "root": 0.0, "corrected": True, "largest": False}
RULES: dict[str, tuple[str, Settings]] = {
    "SGD": ("sgd", {"momentum": 0.0, "nesterov": False}),
    "SGD, momentum, L2": ("sgd", {"momentum": 0.9, "nesterov": False, "decay": 1e-2, "coupled": True}),
    "SGD, Nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "Adam": ("adam", _ADAM),
    "Adam, L2": ("adam", {**_ADAM, "decay": 1e-2, "coupled": True}),
    "AdamW": ("adam", {**_ADAM, "decay": 1e-2}),
    "AdamW, norms and biases exempt": ("adam", {**_ADAM, "decay": 1e-2, "exempt": True}),
    "RMSProp": ("rmsprop", {"alpha": 0.99, "eps": 1e-8, "root": 0.0, "centered": False, "momentum": 0.0}),
    "RMSProp, centered": ("rmsprop", {"alpha": 0.9, "eps": 1e-8, "root": 0.0, "centered": True, "momentum": 0.9}),
    "Adagrad": ("adagrad", {"start": 0.1}),
    "AdaMax": ("adamax", {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "Adadelta": ("adadelta", {"alpha": 0.9, "eps": 1e-6}),
}
# setting -> (mistake, values that it may have instead, what a difference that names it has in its text)
_MISTAKES: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "rate": ("learning rate", (5e-3, 1e-3), "learning rate"),
    "schedule": ("schedule on one side", (True,), "second update"),
    "clip": ("clipping on one side", (1.0,), "clipping"),
    "momentum": ("momentum", (0.0, 0.9, 0.8), "momentum"),
    "nesterov": ("Nesterov momentum", (True, False), "Nesterov"),
    "b1": ("beta", (0.8, 0.95), "beta 1"),
    "b2": ("beta", (0.98, 0.99, 0.95), "beta 2"),
    "alpha": ("decay of the squares", (0.9, 0.99, 0.95), "decay of the squares"),
    "eps": ("epsilon", (1e-6, 1e-5, 1e-10), "epsilon"),
    "root": ("epsilon inside the root", (1e-8,), "epsilon"),
    "corrected": ("no bias correction", (False,), "rule of"),
    "largest": ("AMSGrad", (True,), "rule of"),
    "centered": ("centered", (True, False), "rule of"),
    "start": ("first sum of the squares", (1e-2, 0.5), "epsilon inside the root"),
    "decay": ("weight decay", (0.0, 1e-4, 1e-2), "weight decay"),
    "coupled": ("decay coupled or decoupled", (True, False), "weight decay"),
}


@dataclass(frozen=True)
class _Site:
    """A mistake in one optimizer; `named`: what a difference that names it has in its text."""

    operator: str
    detail: str
    named: tuple[str, ...]
    reference: Any
    candidate: Any
    plant: Callable[[], object | None]


def torch_optimizer(rule: str, settings: Settings) -> Callable[[Sequence[tuple[str, torch.nn.Parameter]]], Any]:
    """A factory of the torch optimizer with these settings."""
    kind, s = RULES[rule][0], {**_COMMON, **settings}
    decay = {"weight_decay": s["decay"]} if s["decay"] else {}

    def build(pairs: Sequence[tuple[str, torch.nn.Parameter]]) -> Any:
        groups: Any = [{"params": [p for _, p in pairs if p.ndim > 1 or not s["exempt"]], **decay}]
        groups.append({"params": [p for _, p in pairs if p.ndim < 2 and s["exempt"]], "weight_decay": 0.0})
        groups = [group for group in groups if group["params"]]
        if kind == "sgd":
            return torch.optim.SGD(groups, s["rate"], s["momentum"], nesterov=s["nesterov"])
        if kind == "adam":
            cls = torch.optim.Adam if s["coupled"] or not s["decay"] else torch.optim.AdamW
            return cls(groups, s["rate"], (s["b1"], s["b2"]), s["eps"])
        if kind == "rmsprop":
            settings = {"centered": s["centered"], "momentum": s["momentum"]}
            return torch.optim.RMSprop(groups, s["rate"], s["alpha"], s["eps"], **settings)
        if kind == "adagrad":
            return torch.optim.Adagrad(groups, s["rate"], initial_accumulator_value=s["start"], eps=0.0)
        if kind == "adamax":
            return torch.optim.Adamax(groups, s["rate"], (s["b1"], s["b2"]), s["eps"])
        return torch.optim.Adadelta(groups, s["rate"], s["alpha"], s["eps"])

    return build


def optax_optimizer(rule: str, settings: Settings) -> optax.GradientTransformation:
    """The optax transformation with these settings."""
    kind, s = RULES[rule][0], {**_COMMON, **settings}
    mask = (lambda tree: {name: array.ndim > 1 for name, array in tree.items()}) if s["exempt"] else None
    decay = [optax.add_decayed_weights(s["decay"], mask)] if s["decay"] else []
    if kind == "sgd":
        core = [optax.trace(s["momentum"], s["nesterov"])] if s["momentum"] else []
    elif kind == "adam" and s["largest"]:
        core = [optax.scale_by_amsgrad(s["b1"], s["b2"], s["eps"], s["root"])]
    elif kind == "adam":
        core = [optax.scale_by_adam(s["b1"], s["b2"], s["eps"], s["root"])] if s["corrected"] else [_uncorrected(s)]
    elif kind == "rmsprop":
        scale = optax.scale_by_stddev if s["centered"] else optax.scale_by_rms
        inside = bool(s["root"])
        core = [scale(s["alpha"], s["root"] if inside else s["eps"], eps_in_sqrt=inside)]
        core += [optax.trace(s["momentum"])] if s["momentum"] else []
    elif kind == "adagrad":
        core = [optax.scale_by_rss(s["start"], 0.0)]
    elif kind == "adamax":
        core = [optax.scale_by_adamax(s["b1"], s["b2"], s["eps"])]
    else:
        core = [optax.scale_by_adadelta(s["alpha"], s["eps"])]
    rate = optax.linear_schedule(s["rate"], 0.0, 100) if s["schedule"] else s["rate"]
    clip = [optax.clip_by_global_norm(s["clip"])] if s["clip"] else []
    parts = [*clip, *decay, *core] if s["coupled"] else [*clip, *core, *decay]
    frozen = optax.masked(optax.set_to_zero(), lambda tree: {name: name == s["frozen"] for name in tree})
    return optax.chain(*parts, optax.scale_by_learning_rate(rate), *([frozen] if s["frozen"] else []))


def _uncorrected(s: Settings) -> optax.GradientTransformation:
    """Adam without bias correction."""

    def update(gradients: Any, state: Any, _: Any = None) -> Any:
        means = {n: s["b1"] * state[0][n] + (1 - s["b1"]) * g for n, g in gradients.items()}
        squares = {n: s["b2"] * state[1][n] + (1 - s["b2"]) * g * g for n, g in gradients.items()}
        return {n: means[n] / (squares[n] ** 0.5 + s["eps"]) for n in gradients}, (means, squares)

    def zeros(tree: Any) -> Any:
        return {name: 0 * array for name, array in tree.items()}

    return optax.GradientTransformation(lambda tree: (zeros(tree), zeros(tree)), update)


def _sites(parameters: Mapping[str, Array], gradients: Sequence[Mapping[str, Array]]) -> Iterator[_Site]:
    for rule, (_, settings) in RULES.items():
        reference = torch_optimizer(rule, settings)
        for operator, detail, named, changes in _mistakes({**_COMMON, **settings}, parameters):
            candidate = optax_optimizer(rule, {**settings, **changes})
            plant = partial(_effect, reference, candidate, parameters, gradients)
            yield _Site(operator, f"{rule}: {detail}", named, reference, candidate, plant)


def _mistakes(
    settings: Settings, parameters: Mapping[str, Array]
) -> Iterator[tuple[str, str, tuple[str, ...], Settings]]:
    """(mistake, detail, what names it, changed settings)."""
    for setting, (operator, values, named) in _MISTAKES.items():
        for value in values:
            if setting in settings and value != settings[setting]:
                yield operator, f"{setting} {settings[setting]} → {value}", (named,), {setting: value}
    if settings["decay"]:
        names = tuple(name for name, array in parameters.items() if np.ndim(array) < 2)
        change = not settings["exempt"]
        yield "decay of norms and biases", f"exempt {change}", ("weight decay", *names[:1]), {"exempt": change}
    for name in parameters:
        yield "parameter not trained", name, (name, "trained"), {"frozen": name}


def _effect(
    reference: Any, candidate: Any, parameters: Mapping[str, Array], gradients: Sequence[Mapping[str, Array]]
) -> object | None:
    """What both make of the parameters; None if they are the same."""
    ends = [update_of(optimizer)(dict(parameters), gradients) for optimizer in (reference, candidate)]
    errors = [np.abs(ends[0][name] - ends[1][name]).max(initial=0) for name in parameters]
    return ends if max(errors) > 1e-6 * _RATE else None


def measure(checked: Mapping[str, Checked], seed: int, count: int) -> list[Score]:
    """The score of each sampled defect."""
    data = {name: _data(entry) for name, entry in checked.items() if name in _PAIRS}
    stock = {name: by_operator(list(_sites(*given)), lambda site: site.operator) for name, given in data.items()}
    scores = []
    for name, site, _ in sample(stock, seed, count):
        parameters, gradients = data[name]
        start = time.perf_counter()
        differences = compare_updates(site.reference, site.candidate, parameters, gradients[0])
        seconds = time.perf_counter() - start
        first = next(iter(differences), None)
        is_first = first is not None and all(word in first.what for word in site.named)
        passed = passed_criteria(site, parameters, gradients)
        scores.append(
            Score(
                name,
                site.operator,
                site.detail,
                ", ".join(site.named),
                bool(differences),
                is_first,
                is_inside=any(all(word in other.what for word in site.named) for other in differences),
                is_repaired=False,
                is_alone=len(differences) == 1,
                named=str(first or "equal"),
                seconds=seconds,
                passed=passed,
            )
        )
        report(len(scores), scores[-1], "; ".join(map(str, differences)))
    return scores


def _data(entry: Checked) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """(the reference's parameters, random gradients of ten updates)."""
    trace, rng = entry.traces[0], np.random.default_rng(0)
    parameters = {n: trace.values[i] for n, i in trace.parameters.items() if trace.values[i].dtype.kind == "f"}
    return parameters, [{n: rng.standard_normal(array.shape) for n, array in parameters.items()} for _ in range(10)]


def passed_criteria(
    site: _Site, parameters: Mapping[str, Array], gradients: Sequence[Mapping[str, Array]]
) -> tuple[str, ...]:
    """The criteria that parameters after one and after ten updates satisfy."""
    passed = []
    for steps, criteria in ((1, CRITERIA[:1]), (10, CRITERIA[1:])):
        ends = [update_of(o)(dict(parameters), gradients[:steps]) for o in (site.reference, site.candidate)]
        one, other = (np.concatenate([(end[n] - parameters[n]).ravel() for n in parameters]) for end in ends)
        passed += [criteria[0]] if np.abs(one - other).max() <= 1e-4 else []
        if len(criteria) > 1 and one @ other > 0.999 * np.linalg.norm(one) * np.linalg.norm(other):
            passed.append(criteria[1])
    return tuple(passed)


def false_alarms(checked: Mapping[str, Checked]) -> list[str]:
    """The rules of optax that are not equal to torch's, without a mistake."""
    data = {name: _data(entry) for name, entry in checked.items() if name in _PAIRS}
    return [
        f"{name}: {rule}: {differences[0]}"
        for name, (parameters, gradients) in data.items()
        for rule, (_, s) in RULES.items()
        if (
            differences := compare_updates(torch_optimizer(rule, s), optax_optimizer(rule, s), parameters, gradients[0])
        )
    ]
