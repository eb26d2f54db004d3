"""The questions of an audit about what a module keeps and draws: gradients, dropout, evaluation, the cache."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .answers import Answer
from .subject import Forward, Subject, difference

_SHOWN = 3  # names in an answer


def reaches_every_parameter(subject: Subject) -> Answer:
    """The share of trained tensors that the loss gives no gradient."""
    src, tgt, labels = subject.tokens(0, 2), subject.tokens(1, 2), subject.tokens(1, 2, 5)
    trained = {name: p for name, p in subject.module.named_parameters() if p.requires_grad}
    with without_dropout(subject.module), subject.mode(True), torch.enable_grad():
        logits = subject.forward(subject.module, src, tgt)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if loss.requires_grad else ()
    reached = dict(zip(trained, found, strict=False))
    left = [name for name in trained if (g := reached.get(name)) is None or not g.any()]
    names = ", ".join(left[:_SHOWN]) + (", …" if len(left) > _SHOWN else "")
    return Answer(
        not left,
        f"{len(left)} of {len(trained)} tensors get none: {names}" if left else f"all {len(trained)} tensors do",
        left[0].rpartition(".")[0] if left else "",
        "These parameters keep their first values: a part of the model is not trained, or not used.",
    )


def dropout_obeys(subject: Subject, setting: float | None) -> Answer:
    """Whether dropout is where and as strong as it is set, in training."""
    wrong = [*dict.fromkeys(_measured_rates(subject, setting))]
    with without_dropout(subject.module):
        left = subject.seen(subject.tokens(0, 8), subject.tokens(1, 8), training=True, operations=True).draws
    fixed = sorted({f"{draw.path or 'the model'}{'' if draw.rate is None else f' ({draw.rate:.2g})'}" for draw in left})
    wrong += [(path.partition(" ")[0], f"{path} draws with every rate set to 0") for path in fixed]
    return Answer(
        not wrong,
        "; ".join(said for _, said in wrong[:_SHOWN]) if wrong else "its rates are as set",
        wrong[0][0] if wrong else "",
        "Two models of one setting are trained differently, and switching dropout off does not.",
    )


def _measured_rates(subject: Subject, setting: float | None) -> Iterator[tuple[str, str]]:
    """(part, what is wrong with its dropout): share of zeros, scale of the rest, or a rate that is not the setting."""
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
            yield path, f"{path} drops {share:.0%} and is set to {rate:.0%}"
        elif kept.any() and difference(y[kept] * (1 - rate), x[kept]) > subject.bound * float(x.abs().max()):
            yield path, f"{path} does not divide by 1 - {rate:.2g}"
    for path, rate in chain(
        ((p, r) for p, m in parts.items() if (r := _rate_of(m)) is not None),
        ((d.path, d.rate) for d in seen.draws if d.rate is not None and _rate_of(parts[d.path]) is None),
    ):
        if setting is not None and abs(rate - setting) > 1e-6:
            yield path, f"{path or 'the model'} has {rate:.2g} and the setting is {setting:.2g}"


def _rate_of(module: nn.Module) -> float | None:
    """The rate of a dropout layer."""
    if not _is_named(module, "dropout"):
        return None
    return next((float(module.__dict__[name]) for name in ("p", "rate") if name in module.__dict__), None)


def _is_named(module: nn.Module, what: str) -> bool:
    return any(what in kind.__name__.lower() for kind in type(module).__mro__)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Every rate that a part keeps as a number is 0 inside."""
    before: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        is_dropout = _is_named(part, "drop")
        for name, value in list(part.__dict__.items()):
            if isinstance(value, float) and ("drop" in name or (is_dropout and name in ("p", "rate"))):
                before.append((part, name, value))
                part.__dict__[name] = 0.0
    try:
        yield
    finally:
        for part, name, value in before:
            part.__dict__[name] = value


def trains_what_it_evaluates(subject: Subject) -> Answer:
    """Whether training computes the same as evaluation where dropout is left out."""
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    with without_dropout(subject.module):
        moved = subject.changed(subject.logits(src, tgt), subject.logits(src, tgt, training=True))
    return Answer(
        not moved,
        f"a logit is {moved:.2g} apart" if moved else "no logit differs",
        "",
        "What is measured and used is not what was trained.",
    )


def evaluation_changes_nothing(subject: Subject) -> Answer:
    """Whether evaluation leaves parameters, buffers and generators of random numbers alone."""
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    before = {name: value.clone() for name, value in subject.module.state_dict().items()}
    seeds = random.getstate(), np.random.get_state()
    first, second = subject.logits(src, tgt), subject.logits(src, tgt)
    draws = subject.seen(src, tgt, operations=True).draws
    after = subject.module.state_dict()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    with torch.no_grad():
        for name, value in before.items():
            after[name].copy_(value)
    again = random.getstate(), np.random.get_state()
    drawn = [draw.path or "the model" for draw in draws]
    drawn += ["Python's or NumPy's generator"] * (repr(seeds) != repr(again))
    said = [f"{len(moved)} of {len(before)} tensors change, as {moved[0]}"] if moved else []
    said += [f"random numbers are drawn in {', '.join(sorted({*drawn})[:_SHOWN])}"] if drawn else []
    if not said and difference(first, second):
        said = [f"the same input gives logits that are {difference(first, second):.2g} apart"]
    return Answer(
        not said,
        "; ".join(said) or "no tensor changes, and nothing is drawn",
        (moved[0].rpartition(".")[0] if moved else drawn[0] if drawn else ""),
        "A model gives another answer the second time, or learns from what it is tested on.",
    )


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


def transformers_cached(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """Logits of a `transformers` encoder-decoder, token by token with its cache."""
    config: Any = module.config
    given, past, found = {"attention_mask": (src != config.pad_token_id).long()}, None, []
    memory = module.get_encoder()(input_ids=src, **given)  # type: ignore[operator]
    for t in range(tgt.shape[1]):
        step = module(
            encoder_outputs=memory,
            decoder_input_ids=tgt[:, t : t + 1],
            past_key_values=past,
            use_cache=True,
            **given,
        )
        past = step.past_key_values
        found.append(step.logits)
    return torch.cat(found, 1)
