"""The checks of an audit that compare a module's inputs and outputs. Each returns an answer with a measurement.

Letters: T target length.
"""

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from .audit_report import Answer
from .instrumentation import Call, Recording
from .state_checks import without_dropout
from .subject import PADDED, Subject, difference, largest

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits (B, T, V), labels (B, T)) -> mean loss
_ROWS = 3  # sentences per batch
_MASS = 1e-9  # largest attention weight that counts as zero
_FLOOR = 1e-3  # nats: largest minimum of a loss that counts as zero


def is_finite(subject: Subject) -> Answer:
    """Whether all outputs are finite, in evaluation, without padding."""
    share, part = subject.not_finite() or (0.0, "")
    return Answer(
        not part,
        f"{share:.0%} of the outputs are NaN or infinite in {subject.dtype_name}" if part else "all outputs are finite",
        part,
        "Its loss is NaN, so it can be neither trained nor used. The other checks are skipped.",
    )


def is_causal(subject: Subject, training: bool) -> Answer:
    """Whether outputs are independent of later target tokens.

    Dropout is off, because in a mixture of experts the number of random draws depends on the routing, so that a later
    token would change the draws of an earlier one.
    """
    src, tgt = subject.tokens(0), subject.tokens(1)
    with without_dropout(subject.module):
        before = subject.logits(src, tgt, training=training)
        worst, position = 0.0, 0
        for u in range(1, tgt.shape[1]):
            after = subject.logits(src, _replace(tgt, u, subject), training=training)
            leak = subject.change(before[:, :u], after[:, :u])
            worst, position = max(worst, leak), u if leak > worst else position
        part = ""
        if worst:
            runs = [subject.record(src, t, training=training) for t in (tgt, _replace(tgt, position, subject))]
            part = _first_difference(runs[0], runs[1], lambda a: _head(a, tgt.shape[1], position), subject.bound)
    return Answer(
        not worst,
        f"a later target token changes an earlier logit by {worst:.2g}" if worst else "no earlier logit changes",
        part,
        (
            "The model sees the tokens that it predicts: its training loss is meaningless, and it cannot generate."
            if training
            else "Validation loss sees the labels, and step-by-step decoding computes another function."
        ),
    )


def sees_the_past(subject: Subject) -> Answer:
    """Whether every target position depends on its own token and on all earlier ones, except the start token."""
    src, tgt = subject.tokens(0), subject.tokens(1)
    before, blind = subject.logits(src, tgt), []
    for u in range(1, tgt.shape[1]):
        after = subject.logits(src, _replace(tgt, u, subject))
        changes = (after - before).abs().amax(-1)[0, u:]
        blind += [(u + int(t), u) for t in torch.nonzero(changes == 0)[:, 0]]
    pairs = (tgt.shape[1] - 1) * tgt.shape[1] // 2
    text = f"{len(blind)} of {pairs} pairs show no influence"
    return Answer(
        not blind,
        f"{text}, such as of token {blind[0][1]} on position {blind[0][0]}" if blind else text,
        "",
        "Generated tokens are ignored: the model repeats itself.",
    )


def sees_the_source(subject: Subject) -> Answer:
    """Whether the outputs depend on the source, and on each of its tokens."""
    src, tgt = subject.tokens(0), subject.tokens(1)
    before, other_src = subject.logits(src, tgt), subject.other_tokens(src, 0)
    change = subject.change(before, subject.logits(other_src, tgt))
    changes = [difference(before, subject.logits(_replace(src, i, subject, 0), tgt)) for i in range(src.shape[1])]
    ignored = changes.count(0)
    part = "" if change else _first_block(subject.record(src, tgt), subject.record(other_src, tgt), subject)
    text = f"another source changes a logit by {change:.2g}"
    return Answer(
        bool(change) and not ignored,
        f"{text}; {ignored} of {src.shape[1]} source tokens have no effect" if ignored else text,
        part,
        "The decoder ignores the source: it learns a language model of the target.",
    )


def ignores_padding(subject: Subject, target: bool = False) -> Answer:
    """Whether padding after a source, or after a target, leaves the outputs of its sentence unchanged."""
    sides = [subject.tokens(0), subject.tokens(1)]
    longer = [_beside_longer(subject, side, target == bool(side) or subject.one_length) for side in (0, 1)]
    change, part = subject.change(subject.logits(*sides), subject.logits(*longer)[:1]), ""
    if change:
        part = _first_difference(subject.record(*sides), subject.record(*longer), lambda a: a, subject.bound)
    return Answer(
        not change,
        f"{PADDED} padding tokens change a logit by {change:.2g}" if change else "no logit changes",
        part,
        "The loss of a sentence depends on the lengths of the others in its batch."
        if target
        else "The translation of a sentence depends on the lengths of the others in its batch.",
    )


def _beside_longer(subject: Subject, side: int, padded: bool) -> Tensor:
    """A sentence and another one, which is longer if the first is to be padded, so that models cannot trim padding."""
    tokens, other = subject.tokens(side), subject.tokens(side, 1, 7)
    if not padded:
        return torch.cat([tokens, other])
    return torch.cat([subject.pad(tokens), torch.cat([other, other[:, :1].expand(-1, PADDED)], 1)])


def keeps_sentences_independent(subject: Subject, training: bool) -> Answer:
    """Whether the outputs of a sentence are independent of the rest of its batch. Without dropout, as `is_causal`."""
    src, tgt = subject.tokens(0, _ROWS), subject.tokens(1, _ROWS)
    others = [torch.cat([side[:1], subject.other_tokens(side[1:], i)]) for i, side in enumerate((src, tgt))]
    breaks, part = "The output of a sentence depends on the other sentences of its batch.", ""
    with without_dropout(subject.module):
        runs = [subject.logits(*batch, training=training) for batch in ((src, tgt), others)]
        change = subject.change(runs[0][:1], runs[1][:1])
        if not training and not change:  # in training each row may have its own random numbers
            change = subject.change(runs[0], subject.logits(src.flip(0), tgt.flip(0)).flip(0))
            if change:
                text = f"another row of the batch changes a logit by {change:.2g}"
                return Answer(False, text, "", "The output of a sentence depends on its row in the batch.")
        if change:
            records = [subject.record(*batch, training=training) for batch in ((src, tgt), others)]
            part = _first_difference(records[0], records[1], lambda a: _head(a, _ROWS, 1), subject.bound)
    return Answer(
        not change, f"other sentences change a logit by {change:.2g}" if change else "no logit changes", part, breaks
    )


def takes_any_lengths(subject: Subject) -> Answer:
    """Whether source and target lengths are independent."""
    problem = "it only accepts targets of the source's length" if subject.one_length else ""
    if not problem:
        src, tgt = subject.tokens(0), subject.tokens(1)
        try:  # on a copy, because a short source makes some models switch to another attention for good
            subject.copy().logits(src[:, : tgt.shape[1] - 1], tgt)
        except Exception as error:  # the module may raise anything
            problem = f"a longer target raises {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return Answer(
        not problem,
        problem or "it may",
        "",
        "No sentence can be decoded step by step, and pairs must be padded to one length.",
    )


def stays_finite(subject: Subject) -> Answer:
    """Whether a source that is all padding, as for an empty line, gives finite outputs.

    If float64 fails, float32 counts too: some models cast the most negative float64 number to float32, where it is
    -inf.
    """
    share, text = _share_lost(subject), "all outputs are finite"
    if share and subject.dtype == torch.float64:
        with suppress(Exception):  # if the module raises in float32, the float64 result counts
            if not _share_lost(subject.copy(torch.float32)):
                text, share = f"all outputs are finite in float32; in float64 {share:.0%} are not", 0.0
    return Answer(
        not share,
        f"{share:.0%} of the outputs are NaN or infinite" if share else text,
        "",
        "One empty line makes the loss of its batch NaN, and with it every parameter.",
    )


def _share_lost(subject: Subject) -> float:
    """The share of outputs that an empty source makes NaN or infinite, in evaluation or training."""
    src, tgt = subject.tokens(0, 2), subject.tokens(1, 2)
    ordinary, shares = subject.logits(src, tgt), []
    src[1] = subject.pad_id
    with without_dropout(subject.module):
        for training in (False, True):
            logits = subject.logits(src, tgt, training=training)
            shares.append(float((logits.isnan() | (logits.isinf() & ordinary.isfinite())).double().mean()))
    return max(shares)


def hides_masked_keys(subject: Subject, harmless: bool) -> Answer:
    """The largest attention weight on padding or on the future; `harmless`: no output depends on them."""
    unpadded = subject.lengths[0]
    src, tgt = subject.pad(subject.tokens(0)), subject.tokens(1)
    tgt = subject.pad(tgt) if subject.one_length else tgt
    source, target = src.shape[1], tgt.shape[1]
    worst, part = 0.0, ""
    count, query_softmax = 0, ""
    for path, output, dim in subject.record(src, tgt, operations=True).softmaxes:
        if output.shape[-2] not in (source, target) or output.shape[-1] not in (source, target):
            continue
        count += 1
        weights = output if dim == -1 else output.transpose(-1, dim)  # keys last
        queries = weights.shape[-2]
        if dim != -1 and not (harmless or (queries, weights.shape[-1]) == (target, source) != (source, target)):
            query_softmax = query_softmax or path
        if (queries, weights.shape[-1]) == (source, target) != (target, source):
            query_softmax = query_softmax or path
            continue
        if weights.shape[-1] == source:  # of the encoder, or cross-attention
            hidden = weights[..., : unpadded if queries == source else None, unpadded:]
        else:
            hidden = weights[..., torch.ones(target, target).triu(1).bool()]
        if (weight := float(torch.nan_to_num(hidden, nan=1.0).max())) > worst:
            worst, part = weight, path if weight > _MASS and part == "" else part
    if not count:
        return Answer(None, "no attention softmax was recorded")
    if query_softmax:
        text = "the softmax is over queries, not over keys"
        return Answer(False, text, query_softmax, "Attention weights over keys do not sum to one.")
    if worst > _MASS and harmless:
        return Answer(True, f"up to {worst:.2g} in the softmax, removed after it")
    breaks = "Attention uses tokens that should be masked: padding, or tokens that are to be predicted."
    return Answer(worst <= _MASS, f"up to {worst:.2g}, in {count} softmaxes", part, breaks)


def cross_entropy_is_free(subject: Subject) -> Answer:
    """The smallest cross entropy that the outputs can reach."""
    vocabulary, parameters = subject.vocabularies[1], list(subject.module.parameters())
    src, tgt, spread = subject.tokens(0), subject.tokens(1), 0.0
    originals = [p.detach().clone() for p in parameters]
    try:
        for factor in (1, 30, 1000):  # unbounded logits grow with the weights
            with torch.no_grad():
                for p, original in zip(parameters, originals, strict=True):
                    p.copy_(original * factor)
            logits = subject.logits(src, tgt)
            finite = torch.where(logits.isfinite(), logits, logits.nan_to_num(0, 0, 0).mean(-1, keepdim=True))
            spread = max(spread, float((finite.amax(-1) - finite.amin(-1)).max()))
    finally:
        with torch.no_grad():
            for p, original in zip(parameters, originals, strict=True):
                p.copy_(original)
    floor, uniform = math.log1p((vocabulary - 1) * math.exp(-spread)), math.log(vocabulary)
    return Answer(
        floor <= _FLOOR,
        f"its minimum is {floor:.2f} nats; a uniform prediction has {uniform:.2f}"
        if floor > _FLOOR
        else "the spread of the logits is not bounded",
        "the output" if floor > _FLOOR else "",
        "The outputs are bounded, as probabilities are: the loss stays near its initial value, with small gradients.",
    )


def loss_is_right(subject: Subject, loss: Loss | None) -> Answer:
    """The loss of confident correct logits and of uniform logits, with and without padding among the labels."""
    if loss is None:
        return Answer(None, "no loss was given")
    labels, vocabulary = subject.tokens(1, 2), subject.vocabularies[1]
    uniform = math.log(vocabulary)
    certain = torch.nn.functional.one_hot(labels, vocabulary).float()
    # Log-probabilities are valid logits. A smoothed label has its minimum at finite confidence.
    best = min(float(loss((certain * 2.0**n).log_softmax(-1), labels)) for n in range(8))
    padded, hidden = labels.clone(), min(PADDED, labels.shape[1] // 2)
    padded[:, labels.shape[1] - hidden :] = subject.pad_id
    equal = torch.zeros_like(certain).log_softmax(-1)
    full, part = float(loss(equal, labels)), float(loss(equal, padded))
    share = 1 - hidden / labels.shape[1]
    ignored = min(abs(part - full), abs(part - full * share)) < 1e-4 * max(1.0, full)
    text = f"{best:.2f} nats for confident correct logits, {full:.2f} for uniform ones (log V = {uniform:.2f})"
    correct = ignored and -1e-4 <= best < full / 2 and uniform / 2 < full < uniform * 1.5  # some subtract an entropy
    return Answer(
        correct,
        text if ignored else f"{text}, but {part:.2f} if {hidden} of {labels.shape[1]} labels are padding",
        "",
        "The model learns to predict padding, or the loss does not measure its quality.",
    )


def _replace(tokens: Tensor, i: int, subject: Subject, side: int = 1) -> Tensor:
    """The tokens with another one at position i."""
    copy = tokens.clone()
    copy[:, i] = subject.other_tokens(tokens, side)[:, i]
    return copy


def _head(a: Tensor, length: int, cut: int) -> Tensor:
    """The first `cut` entries along the first dimension of size `length`."""
    dim = next((d for d, size in enumerate(a.shape) if size == length), None)
    return a if dim is None else a.narrow(dim, 0, cut)


def _first_difference(a: Recording, b: Recording, select: Callable[[Tensor], Tensor], bound: float) -> str:
    """The first part of the model with different outputs in two recordings; `select` crops them before comparison."""
    for first, second in zip(a.calls, b.calls, strict=False):
        for x, y in zip(first.outputs, second.outputs, strict=False):
            if difference(select(x), select(y)) > bound * largest(x):
                return _name(first.path)
    return ""


def _first_block(a: Recording, b: Recording, subject: Subject) -> str:
    """The first part of the model with different inputs but equal outputs in two recordings."""

    def differ(x: list[Tensor], y: list[Tensor]) -> bool:
        return any(difference(p, q) > subject.bound * largest(p) for p, q in zip(x, y, strict=False))

    def blocks(p: Call, q: Call) -> bool:
        return differ(p.inputs, q.inputs) and bool(p.outputs) and not differ(p.outputs, q.outputs)

    return next((_name(p.path) for p, q in zip(a.calls, b.calls, strict=False) if blocks(p, q)), "")


def _name(path: str) -> str:
    return path or "the whole model"
