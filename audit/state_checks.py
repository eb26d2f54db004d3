"""The questions of an audit about what a module keeps and draws: gradients, dropout, evaluation, the cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_reference.dropout import Dropout as TwinDropout
from .audit_report import Answer
from .subject import Forward, Subject, difference, same

_SHOWN = 3  # names in an answer
_BATCHES = 13  # in which a parameter may get its gradient: 2 sentences, then 8 each


def reaches_every_parameter(subject: Subject) -> Answer:
    """The share of trained tensors that the loss gives no gradient, or one that is not finite."""
    parameters = dict(subject.module.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    left, broken, foreign = set(trained), set(), 0
    for batch in range(_BATCHES):  # an expert may get no token of one batch
        loss, gradients = _gradients(subject, trained, batch)
        left -= {name for name, g in gradients.items() if g.any()}
        broken |= {name for name, g in gradients.items() if not g.isfinite().all()}
        foreign = len(_leaves(loss) - {id(p) for p in parameters.values()})
        if not left or broken:
            break
    missing, broken = ([name for name in trained if name in names] for names in (left, broken))
    said = [f"{len(missing)} of {len(trained)} tensors get none: {_shown(missing)}"] if missing else []
    said += [f"{len(broken)} get one with nan or infinities: {_shown(broken)}"] if broken else []
    said += [f"{foreign} tensors are trained that are no parameters of the module"] if foreign else []
    frozen = f"; {len(parameters) - len(trained)} are frozen" if len(parameters) > len(trained) else ""
    return Answer(
        not said,
        ("; ".join(said) or f"all {len(trained)} tensors do") + frozen,
        next(iter(missing or broken or [""])).rpartition(".")[0],
        "These parameters keep their first values: a part of the model is not trained, or not used."
        if not foreign
        else "No optimiser sees them, no checkpoint holds them: a layer stands in a plain list or dictionary.",
    )


def _gradients(subject: Subject, trained: Mapping[str, Tensor], batch: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss, its gradients that are not absent, by name) of the `batch`-th random batch."""
    rows = 8 if batch else 2
    src, tgt, labels = (subject.tokens(side, rows, salt + 10 * batch) for side, salt in ((0, 0), (1, 0), (1, 5)))
    with without_dropout(subject.module), subject.mode(True), torch.enable_grad():
        logits = subject.forward(subject.module, src, tgt)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if loss.requires_grad else ()
    return loss, {name: g for name, g in zip(trained, found, strict=False) if g is not None}


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _leaves(loss: Tensor) -> set[int]:
    """The tensors that receive a gradient in a backward pass, by `id`."""
    waiting, met, found = [loss.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            leaf = getattr(node, "variable", None)
            found |= set() if leaf is None else {id(leaf)}
            waiting += [following for following, _ in node.next_functions]
    return found


def dropout_obeys(subject: Subject, setting: float | None) -> Answer:
    """Whether dropout is where and as strong as it is set, in training."""
    wrong, seen = _measured_rates(subject, setting)
    with without_dropout(subject.module):
        left = subject.seen(subject.tokens(0, 8), subject.tokens(1, 8), training=True, operations=True).draws
    for path, rate in sorted({(draw.path, draw.rate or 0.0) for draw in left}):
        wrong.append((path, f"{path or 'the model'} {f'({rate:.2g}) ' if rate else ''}draws with every rate set to 0"))
    if setting and not seen:
        wrong.append(("", f"none was seen, and the setting is {setting:.2g}"))
    wrong = [*dict.fromkeys(wrong)]
    return Answer(
        not wrong,
        "; ".join(said for _, said in wrong[:_SHOWN]) or ("its rates are as set" if seen else "there is none"),
        wrong[0][0] if wrong else "",
        "Two models of one setting are trained differently, and switching dropout off does not.",
    )


def _measured_rates(subject: Subject, setting: float | None) -> tuple[list[tuple[str, str]], bool]:
    """([(part, what is wrong with its dropout)], whether there is any): zeros, scale of the rest, and its setting."""
    wrong: list[tuple[str, str]] = []
    parts = dict(subject.module.named_modules())
    seen = subject.seen(subject.tokens(0, 8), subject.tokens(1, 8), training=True, operations=True)
    for path, inputs, outputs in seen.calls:
        rate = _rate_of(parts[path])
        if rate is None or not inputs or not outputs or inputs[0].shape != outputs[0].shape:
            continue
        x, y = inputs[0][inputs[0] != 0], outputs[0][inputs[0] != 0]
        if not x.numel():
            continue
        share, kept = float((y == 0).double().mean()), y != 0
        if abs(share - rate) > 5 * (rate * (1 - rate) / x.numel()) ** 0.5 + 1e-9:
            wrong.append((path, f"{path} drops {share:.0%} and is set to {rate:.0%}"))
        elif kept.any() and difference(y[kept] * (1 - rate), x[kept]) > subject.bound * float(x.abs().max()):
            wrong.append((path, f"{path} does not divide by 1 - {rate:.2g}"))
    rates = [(path, rate) for path, module in parts.items() if (rate := _rate_of(module)) is not None]
    rates += [(d.path, d.rate) for d in seen.draws if d.rate is not None and _rate_of(parts[d.path]) is None]
    for path, rate in rates:
        if setting is not None and abs(rate - setting) > 1e-6:
            wrong.append((path, f"{path or 'the model'} has {rate:.2g} and the setting is {setting:.2g}"))
    return wrong, any(rate for _, rate in rates) or bool(seen.draws)


def _rate_of(module: nn.Module) -> float | None:
    """The rate of a dropout layer whose elements fall one by one."""
    if isinstance(module, nn.Dropout):
        return module.p
    return module.rate if isinstance(module, TwinDropout) else None


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Every rate of dropout or noise that a part keeps as a number, or in an object or dictionary, is 0 inside."""
    before: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        is_dropout = any("drop" in kind.__name__.lower() for kind in type(part).__mro__)
        for holder in (part.__dict__, *map(_settings, part.__dict__.values())):
            for name, value in list(holder.items()):
                named = isinstance(name, str) and (
                    "drop" in name or "noise" in name or (is_dropout and name in ("p", "rate"))
                )
                if named and isinstance(value, float):
                    before.append((holder, name, value))
                    holder[name] = 0.0
    try:
        yield
    finally:
        for holder, name, value in reversed(before):
            holder[name] = value


def _settings(value: Any) -> dict[Any, Any]:
    """What an attribute holds, where it is no part of the computation."""
    if isinstance(value, dict):
        return value
    is_part = isinstance(value, Tensor | nn.Module | type) or callable(value)
    return {} if is_part else getattr(value, "__dict__", {})


def trains_what_it_evaluates(subject: Subject) -> Answer:
    """Whether training computes the same as evaluation where dropout is left out."""
    src, tgt = subject.pad(subject.tokens(0, 2)), subject.tokens(1, 2)
    tgt = subject.pad(tgt) if subject.one_length else tgt
    with without_dropout(subject.module):
        moved = subject.changed(subject.logits(src, tgt), subject.logits(src, tgt, training=True))
    return Answer(
        not moved,
        f"a logit is {moved:.2g} apart" if moved else "no logit differs",
        "",
        "What is measured and used is not what was trained.",
    )


def evaluation_changes_nothing(subject: Subject) -> Answer:
    """Whether evaluation leaves parameters, buffers, ids and generators of random numbers alone."""
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    before = {name: p.detach().clone() for name, p in subject.module.named_parameters()}
    first, second = subject.logits(src, tgt), subject.logits(src, tgt)
    edited, drew, moved = subject.edited, subject.drew, subject.moved
    draws = subject.seen(src, tgt, operations=True).draws
    moved = moved + [name for name, p in subject.module.named_parameters() if not same(p, before[name])]
    with torch.no_grad():
        for name, p in subject.module.named_parameters():
            p.copy_(before[name])
    drawn = sorted({draw.path or "the model" for draw in draws}) + ["Python's or NumPy's generator"] * drew
    said = [f"{len(moved)} tensors change, as {moved[0]}"] if moved else []
    said += [f"random numbers are drawn in {', '.join(drawn[:_SHOWN])}"] if drawn else []
    said += ["the ids that it was given are changed"] if edited else []
    if not said and difference(first, second):
        said = [f"the same input gives logits that are {difference(first, second):.2g} apart"]
    if not said and (change := subject.changed(first, _after_short_source(subject, src, tgt))):
        said = [f"after a shorter source the same input gives logits that are {change:.2g} apart"]
    return Answer(
        not said,
        "; ".join(said) or "no tensor changes, and nothing is drawn",
        moved[0].rpartition(".")[0] if moved else draws[0].path if draws else "",
        "A model gives another answer the second time, or learns from what it is tested on.",
    )


def _after_short_source(subject: Subject, src: Tensor, tgt: Tensor) -> Tensor:
    """Logits of a copy that was called with a shorter source before."""
    copy = subject.copy()
    with suppress(Exception):  # the module's own; `takes_any_lengths` reports it
        copy.logits(src[:, : src.shape[1] // 2], tgt)
    return copy.logits(src, tgt)


def cache_changes_nothing(subject: Subject, cached: Forward | None) -> Answer:
    """Whether outputs that are computed position by position, with a cache, are those of the whole target."""
    breaks = "What the model writes is not what it was trained to write."
    if cached is None:
        return Answer(None, "no cached decoding was given")
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    with subject.mode(False), torch.no_grad():
        stepwise = cached(subject.module, src, tgt)
    whole = subject.logits(src, tgt)
    if stepwise.shape != whole.shape:
        return Answer(False, f"it returns {tuple(stepwise.shape)}, not {tuple(whole.shape)}", "", breaks)
    moved = subject.changed(whole, stepwise)
    first = next((t for t in range(whole.shape[1]) if subject.changed(whole[:, t], stepwise[:, t])), None)
    said = f"a logit is {moved:.2g} apart, first at position {first}" if moved else "no logit differs"
    return Answer(not moved, said, "", breaks)
