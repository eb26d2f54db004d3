"""The checks of an audit that concern a module's state and randomness: gradients, dropout, evaluation, the cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_reference.dropout import Dropout as TwinDropout
from .audit_report import Answer
from .instrumentation import Draw, Recording
from .subject import Forward, Subject, difference, same

_MAX_NAMES = 3  # maximum number of names in an answer
_SEEDS = 16  # a draw without effect has none with any of so many seeds: a layer may be dropped rarely
_BATCHES = 13  # batches in which a parameter may get its gradient: 2 sentences, then 8 each


def reaches_every_parameter(subject: Subject) -> Answer:
    """Whether every trained tensor gets a finite gradient that is not all zeros."""
    parameters = dict(subject.module.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    missing, broken, unregistered = set(trained), set(), 0
    for batch in range(_BATCHES):  # an expert may get no token of one batch
        loss, gradients = _gradients(subject, trained, batch)
        missing -= {name for name, g in gradients.items() if g.any()}
        broken |= {name for name, g in gradients.items() if not g.isfinite().all()}
        unregistered = len(_leaves(loss) - {id(p) for p in parameters.values()})
        if not missing or broken:
            break
    missing, broken = ([name for name in trained if name in names] for names in (missing, broken))
    problems = [f"{len(missing)} of {len(trained)} tensors get no gradient: {_join(missing)}"] if missing else []
    problems += [f"{len(broken)} get a gradient with NaN or infinity: {_join(broken)}"] if broken else []
    problems += [f"{unregistered} trained tensors are not parameters of the module"] if unregistered else []
    frozen = f"; {len(parameters) - len(trained)} are frozen" if len(parameters) > len(trained) else ""
    return Answer(
        not problems,
        ("; ".join(problems) or f"all {len(trained)} tensors do") + frozen,
        next(iter(missing or broken or [""])).rpartition(".")[0],
        "These parameters keep their initial values: a part of the model is not trained, or not used."
        if not unregistered
        else "Optimizers and checkpoints omit them: a layer is in a plain list or dictionary.",
    )


def _gradients(subject: Subject, trained: Mapping[str, Tensor], batch: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, its gradients by name, without absent ones) for the `batch`-th random batch."""
    rows = 8 if batch else 2
    src, tgt, labels = (subject.tokens(side, rows, salt + 10 * batch) for side, salt in ((0, 0), (1, 0), (1, 5)))
    with without_dropout(subject.module), subject.mode(True), torch.enable_grad():
        logits = subject.forward(subject.module, src, tgt)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        tensors = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if loss.requires_grad else ()
    return loss, {name: g for name, g in zip(trained, tensors, strict=False) if g is not None}


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")


def _leaves(loss: Tensor) -> set[int]:
    """The `id`s of the tensors that receive a gradient in a backward pass."""
    queue, visited, leaves = [loss.grad_fn], set(), set()
    while queue:
        node = queue.pop()
        if node is not None and node not in visited:
            visited.add(node)
            leaf = getattr(node, "variable", None)
            leaves |= set() if leaf is None else {id(leaf)}
            queue += [successor for successor, _ in node.next_functions]
    return leaves


def dropout_obeys(subject: Subject, setting: float | None) -> Answer:
    """Whether the sites and rates of dropout in training are as set."""
    problems, has_dropout = _measure_rates(subject, setting)
    with without_dropout(subject.module):
        draws = _draws(
            subject, subject.record(subject.tokens(0, 8), subject.tokens(1, 8), training=True, operations=True)
        )
    for path, rate in sorted({(draw.path, draw.rate or 0.0) for draw in draws}):
        suffix = f"({rate:.2g}) " if rate else ""
        problems.append((path, f"{path or 'the model'} {suffix}draws random numbers with every rate set to 0"))
    if setting and not has_dropout:
        problems.append(("", f"there is none, but the setting is {setting:.2g}"))
    problems = [*dict.fromkeys(problems)]
    return Answer(
        not problems,
        "; ".join(text for _, text in problems[:_MAX_NAMES])
        or ("its rates are as set" if has_dropout else "there is none"),
        problems[0][0] if problems else "",
        "Models with the same setting train differently, and setting the rate to 0 does not disable dropout.",
    )


def _measure_rates(subject: Subject, setting: float | None) -> tuple[list[tuple[str, str]], bool]:
    """([(part, problem of its dropout)], whether there is any dropout): share of zeros, scale of the rest, rate."""
    problems: list[tuple[str, str]] = []
    parts = dict(subject.module.named_modules())
    recording = subject.record(subject.tokens(0, 8), subject.tokens(1, 8), training=True, operations=True)
    for path, inputs, outputs in recording.calls:
        rate = _rate_of(parts[path])
        if rate is None or not inputs or not outputs or inputs[0].shape != outputs[0].shape:
            continue
        x, y = inputs[0][inputs[0] != 0], outputs[0][inputs[0] != 0]
        if not x.numel():
            continue
        share, mask = float((y == 0).double().mean()), y != 0
        if abs(share - rate) > 5 * (rate * (1 - rate) / x.numel()) ** 0.5 + 1e-9:
            problems.append((path, f"{path} drops {share:.0%} and is set to {rate:.0%}"))
        elif mask.any() and difference(y[mask] * (1 - rate), x[mask]) > subject.bound * float(x.abs().max()):
            problems.append((path, f"{path} does not divide by 1 - {rate:.2g}"))
    rates = [(path, rate) for path, module in parts.items() if (rate := _rate_of(module)) is not None]
    draws = _draws(subject, recording)
    rates += [(d.path, d.rate) for d in draws if d.rate is not None and _rate_of(parts[d.path]) is None]
    for path, rate in rates:
        if setting is not None and abs(rate - setting) > 1e-6:
            problems.append((path, f"{path or 'the model'} has {rate:.2g} and the setting is {setting:.2g}"))
    return problems, any(rate for _, rate in rates) or bool(draws)


def _draws(subject: Subject, recording: Recording) -> list[Draw]:
    """The draws of training, unless the outputs depend on none: LayerDrop with rate 0 may draw, and drop no layer."""
    src, tgt = subject.tokens(0, 8), subject.tokens(1, 8)
    if any(draw.rate for draw in recording.draws):
        return recording.draws
    seeds = range(subject.seed, subject.seed + _SEEDS + 1) if recording.draws else ()
    outputs = (replace(subject, seed=seed).logits(src, tgt, training=True) for seed in seeds)
    first = next(outputs, None)
    return recording.draws if first is not None and any(subject.change(first, other) for other in outputs) else []


def _rate_of(module: nn.Module) -> float | None:
    """The rate of an elementwise dropout layer; None for other modules."""
    if isinstance(module, nn.Dropout):
        return module.p
    return module.rate if isinstance(module, TwinDropout) else None


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Set every rate of dropout or noise to 0 that a submodule stores as a number, or in an object or dictionary."""
    before: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        is_dropout = any("drop" in kind.__name__.lower() for kind in type(part).__mro__)
        for holder in (part.__dict__, *map(_settings, part.__dict__.values())):
            for name, value in list(holder.items()):
                is_rate = isinstance(name, str) and (
                    "drop" in name or "noise" in name or (is_dropout and name in ("p", "rate"))
                )
                if is_rate and isinstance(value, float):
                    before.append((holder, name, value))
                    holder[name] = 0.0
    try:
        yield
    finally:
        for holder, name, value in reversed(before):
            holder[name] = value


def _settings(value: Any) -> dict[Any, Any]:
    """The entries of an attribute that holds settings; empty for tensors, modules, classes and functions."""
    if isinstance(value, dict):
        return value
    is_part = isinstance(value, Tensor | nn.Module | type) or callable(value)
    return {} if is_part else getattr(value, "__dict__", {})


def trains_what_it_evaluates(subject: Subject) -> Answer:
    """Whether training computes the same as evaluation if dropout is off."""
    src, tgt = subject.pad(subject.tokens(0, 2)), subject.tokens(1, 2)
    tgt = subject.pad(tgt) if subject.one_length else tgt
    with without_dropout(subject.module):
        change = subject.change(subject.logits(src, tgt), subject.logits(src, tgt, training=True))
    return Answer(
        not change,
        f"a logit differs by {change:.2g}" if change else "no logit differs",
        "",
        "The model that is evaluated is not the one that was trained.",
    )


def evaluation_changes_nothing(subject: Subject) -> Answer:
    """Whether evaluation leaves parameters, buffers, ids and random number generators unchanged."""
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    before = {name: p.detach().clone() for name, p in subject.module.named_parameters()}
    first, second = subject.logits(src, tgt), subject.logits(src, tgt)
    writes_ids, uses_generators, names = subject.writes_ids, subject.uses_generators, subject.changed_buffers
    draws = subject.record(src, tgt, operations=True).draws
    names = names + [name for name, p in subject.module.named_parameters() if not same(p, before[name])]
    with torch.no_grad():
        for name, p in subject.module.named_parameters():
            p.copy_(before[name])
    places = sorted({draw.path or "the model" for draw in draws}) + ["Python's or NumPy's generator"] * uses_generators
    problems = [f"{len(names)} tensors change, such as {names[0]}"] if names else []
    problems += [f"random numbers are drawn in {', '.join(places[:_MAX_NAMES])}"] if places else []
    problems += ["the input ids are changed"] if writes_ids else []
    if not problems and difference(first, second):
        problems = [f"the logits of two calls with the same input differ by {difference(first, second):.2g}"]
    if not problems and (change := subject.change(first, _after_short_source(subject, src, tgt))):
        problems = [f"after a call with a shorter source, the logits of the same input differ by {change:.2g}"]
    return Answer(
        not problems,
        "; ".join(problems) or "no tensor changes, and nothing is drawn",
        names[0].rpartition(".")[0] if names else draws[0].path if draws else "",
        "The model's outputs differ between calls, or it learns from the test data.",
    )


def _after_short_source(subject: Subject, src: Tensor, tgt: Tensor) -> Tensor:
    """Logits of a copy that was called with a shorter source before."""
    copy = subject.copy()
    with suppress(Exception):  # `takes_any_lengths` reports it
        copy.logits(src[:, : src.shape[1] // 2], tgt)
    return copy.logits(src, tgt)


def cache_changes_nothing(subject: Subject, cached: Forward | None) -> Answer:
    """Whether outputs computed step by step with a cache equal those of the whole target."""
    breaks = "Decoding computes another function than training."
    if cached is None:
        return Answer(None, "no cached decoding was given")
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    with subject.mode(False), torch.no_grad():
        stepwise = cached(subject.module, src, tgt)
    whole = subject.logits(src, tgt)
    if stepwise.shape != whole.shape:
        return Answer(False, f"it returns {tuple(stepwise.shape)}, not {tuple(whole.shape)}", "", breaks)
    change = subject.change(whole, stepwise)
    first = next((t for t in range(whole.shape[1]) if subject.change(whole[:, t], stepwise[:, t])), None)
    text = f"a logit differs by {change:.2g}, first at position {first}" if change else "no logit differs"
    return Answer(not change, text, "", breaks)
