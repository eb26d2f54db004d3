"""The questions of an audit about what goes in and what comes out. Each returns an answer that was measured.

Letters: T target length.
"""

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from .audit_report import Answer
from .instrumentation import Call, Seen
from .state_checks import without_dropout
from .subject import PADDED, Subject, difference, largest

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits (B, T, V), labels (B, T)) -> a mean
_ROWS = 3  # sentences of a batch
_MASS = 1e-9  # an attention weight that counts as none
_FLOOR = 1e-3  # nats that a loss may stay above zero


def is_finite(subject: Subject) -> Answer:
    """Whether all outputs are finite, in evaluation, without padding."""
    share, where = subject.not_finite() or (0.0, "")
    return Answer(
        not where,
        f"{share:.0%} of the outputs are NaN or infinite in {subject.dtype_name}"
        if where
        else "all outputs are finite",
        where,
        "Its loss is NaN: it can neither be trained nor used. No other question is asked.",
    )


def is_causal(subject: Subject, training: bool) -> Answer:
    """Whether a target token changes an earlier output.

    Without dropout: a layer that gets the tokens of one expert draws as many numbers as it gets tokens, so that a later
    token would move the draws of an earlier one.
    """
    src, tgt = subject.tokens(0), subject.tokens(1)
    with without_dropout(subject.module):
        before = subject.logits(src, tgt, training=training)
        worst, at = 0.0, 0
        for u in range(1, tgt.shape[1]):
            after = subject.logits(src, _at(tgt, u, subject), training=training)
            leak = subject.changed(before[:, :u], after[:, :u])
            worst, at = max(worst, leak), u if leak > worst else at
        where = ""
        if worst:
            runs = [subject.seen(src, t, training=training) for t in (tgt, _at(tgt, at, subject))]
            where = _first_apart(runs[0], runs[1], lambda a: _head(a, tgt.shape[1], at), subject.bound)
    return Answer(
        not worst,
        f"a later target token moves an earlier logit by {worst:.2g}" if worst else "no earlier logit moves",
        where,
        (
            "The model reads the words that it is to predict: its training loss means nothing, and it cannot write."
            if training
            else "Validation loss sees the answer, and decoding word by word computes something else."
        ),
    )


def sees_the_past(subject: Subject) -> Answer:
    """Whether every target position depends on its own token and on those before it, but for the start."""
    src, tgt = subject.tokens(0), subject.tokens(1)
    before, blind = subject.logits(src, tgt), []
    for u in range(1, tgt.shape[1]):
        after = subject.logits(src, _at(tgt, u, subject))
        apart = (after - before).abs().amax(-1)[0, u:]
        blind += [(u + int(t), u) for t in torch.nonzero(apart == 0)[:, 0]]
    pairs = (tgt.shape[1] - 1) * tgt.shape[1] // 2
    said = f"{len(blind)} of {pairs} pairs of positions have no influence"
    return Answer(
        not blind,
        f"{said}, as position {blind[0][0]} from token {blind[0][1]}" if blind else said,
        "",
        "Words that were said already do not count: the model repeats itself.",
    )


def sees_the_source(subject: Subject) -> Answer:
    """Whether the outputs depend on the source, and on each of its tokens."""
    src, tgt = subject.tokens(0), subject.tokens(1)
    before, other = subject.logits(src, tgt), subject.other(src, 0)
    moved = subject.changed(before, subject.logits(other, tgt))
    unseen = [i for i in range(src.shape[1]) if not difference(before, subject.logits(_at(src, i, subject, 0), tgt))]
    where = _last_reached(subject.seen(src, tgt), subject.seen(other, tgt), subject) if not moved else ""
    said = f"another source moves a logit by {moved:.2g}"
    return Answer(
        bool(moved) and not unseen,
        f"{said}; {len(unseen)} of {src.shape[1]} source tokens move nothing" if unseen else said,
        where,
        "The decoder does not know what it translates: it learns a language model of the target.",
    )


def ignores_padding(subject: Subject, target: bool = False) -> Answer:
    """Whether padding behind a source, or behind a target, changes the outputs of its sentence."""
    sides = [subject.tokens(0), subject.tokens(1)]
    longer = [_beside_longer(subject, side, target == bool(side) or subject.one_length) for side in (0, 1)]
    moved, where = subject.changed(subject.logits(*sides), subject.logits(*longer)[:1]), ""
    if moved:
        where = _first_apart(subject.seen(*sides), subject.seen(*longer), lambda a: a, subject.bound)
    return Answer(
        not moved,
        f"{PADDED} pads move a logit by {moved:.2g}" if moved else "no logit moves",
        where,
        "The loss of a sentence depends on how long the others of its batch are."
        if target
        else "A sentence is translated otherwise beside longer ones.",
    )


def _beside_longer(subject: Subject, side: int, padded: bool) -> Tensor:
    """A sentence and another one, which is longer where the first is to be padded: else a model may cut padding off."""
    tokens, other = subject.tokens(side), subject.tokens(side, 1, 7)
    if not padded:
        return torch.cat([tokens, other])
    return torch.cat([subject.pad(tokens), torch.cat([other, other[:, :1].expand(-1, PADDED)], 1)])


def keeps_sentences_apart(subject: Subject, training: bool) -> Answer:
    """Whether the other sentences of a batch change the outputs of one. Without dropout, as in `is_causal`."""
    src, tgt = subject.tokens(0, _ROWS), subject.tokens(1, _ROWS)
    others = [torch.cat([side[:1], subject.other(side[1:], i)]) for i, side in enumerate((src, tgt))]
    breaks, where = "What a sentence gives depends on chance: on what else is in its batch.", ""
    with without_dropout(subject.module):
        runs = [subject.logits(*batch, training=training) for batch in ((src, tgt), others)]
        moved = subject.changed(runs[0][:1], runs[1][:1])
        if not training and not moved:  # in training each row may have random numbers of its own
            moved = subject.changed(runs[0], subject.logits(src.flip(0), tgt.flip(0)).flip(0))
            if moved:
                said = f"another row of the batch moves a logit by {moved:.2g}"
                return Answer(False, said, "", "What a sentence gives depends on its place in the batch.")
        if moved:
            seen = [subject.seen(*batch, training=training) for batch in ((src, tgt), others)]
            where = _first_apart(seen[0], seen[1], lambda a: _head(a, _ROWS, 1), subject.bound)
    return Answer(
        not moved, f"other sentences move a logit by {moved:.2g}" if moved else "no logit moves", where, breaks
    )


def takes_any_lengths(subject: Subject) -> Answer:
    """Whether sources and targets may have lengths of their own."""
    said = "it takes targets of the source's length only" if subject.one_length else ""
    if not said:
        src, tgt = subject.tokens(0), subject.tokens(1)
        try:  # on a copy: after a short source some use another kind of attention for good
            subject.copy().logits(src[:, : tgt.shape[1] - 1], tgt)
        except Exception as error:  # the module's own
            said = f"a longer target raises {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return Answer(
        not said,
        said or "it may",
        "",
        "No sentence can be decoded word by word, and pairs must be padded to one length.",
    )


def stays_finite(subject: Subject) -> Answer:
    """Whether a source that is all padding, as empty lines are, gives finite outputs.

    In float32 too if not in float64, whose most negative number some models cast to float32, where it is -inf.
    """
    share, said = _share_lost(subject), "all outputs are finite"
    if share and subject.dtype == torch.float64:
        with suppress(Exception):  # what the module raises in float32 is no reason to trust it
            if not _share_lost(subject.copy(torch.float32)):
                said, share = f"all outputs are finite in float32; in float64 {share:.0%} are not", 0.0
    return Answer(
        not share,
        f"{share:.0%} of the outputs are NaN or infinite" if share else said,
        "",
        "One empty line makes the loss of its batch nan, and with it every parameter.",
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
    real = subject.lengths[0]
    src, tgt = subject.pad(subject.tokens(0)), subject.tokens(1)
    tgt = subject.pad(tgt) if subject.one_length else tgt
    source, target, worst, where, seen, across = src.shape[1], tgt.shape[1], 0.0, "", 0, ""
    for path, found, over in subject.seen(src, tgt, operations=True).softmaxes:
        if found.shape[-2] not in (source, target) or found.shape[-1] not in (source, target):
            continue
        seen += 1
        weights = found if over == -1 else found.transpose(-1, over)  # keys last
        queries = weights.shape[-2]
        if over != -1 and not (harmless or (queries, weights.shape[-1]) == (target, source) != (source, target)):
            across = across or path
        if (queries, weights.shape[-1]) == (source, target) != (target, source):
            across = across or path
            continue
        if weights.shape[-1] == source:  # of the encoder, or cross-attention
            hidden = weights[..., : real if queries == source else None, real:]
        else:
            hidden = weights[..., torch.ones(target, target).triu(1).bool()]
        if (most := float(torch.nan_to_num(hidden, nan=1.0).max())) > worst:
            worst, where = most, path if most > _MASS and where == "" else where
    if not seen:
        return Answer(None, "no softmax of attention was seen")
    if across:
        said = "the softmax is over queries, not over keys"
        return Answer(False, said, across, "Weights of a word do not add up to one: attention is no mean.")
    if worst > _MASS and harmless:
        return Answer(True, f"up to {worst:.2g} in the softmax, taken away behind it")
    breaks = "Words that must not be seen are: padding, or those that are to be predicted."
    return Answer(worst <= _MASS, f"up to {worst:.2g}, in {seen} softmaxes", where, breaks)


def cross_entropy_is_free(subject: Subject) -> Answer:
    """The least cross entropy that the outputs can have."""
    vocabulary, weights = subject.vocabularies[1], list(subject.module.parameters())
    src, tgt, spread = subject.tokens(0), subject.tokens(1), 0.0
    originals = [p.detach().clone() for p in weights]
    try:
        for factor in (1, 30, 1000):  # a head that is free can be as sure as its weights are large
            with torch.no_grad():
                for p, original in zip(weights, originals, strict=True):
                    p.copy_(original * factor)
            logits = subject.logits(src, tgt)
            finite = torch.where(logits.isfinite(), logits, logits.nan_to_num(0, 0, 0).mean(-1, keepdim=True))
            spread = max(spread, float((finite.amax(-1) - finite.amin(-1)).max()))
    finally:
        with torch.no_grad():
            for p, original in zip(weights, originals, strict=True):
                p.copy_(original)
    floor, uniform = math.log1p((vocabulary - 1) * math.exp(-spread)), math.log(vocabulary)
    return Answer(
        floor <= _FLOOR,
        f"its least value is {floor:.2f} nats, and {uniform:.2f} is that of knowing nothing"
        if floor > _FLOOR
        else "outputs may lie as far apart as they like",
        "the output" if floor > _FLOOR else "",
        "The outputs are bounded, as probabilities are: the loss stays near its beginning and gradients are small.",
    )


def loss_is_right(subject: Subject, loss: Loss | None) -> Answer:
    """The loss of certainty and of knowing nothing, with padding among the labels and without."""
    if loss is None:
        return Answer(None, "no loss was given")
    labels, vocabulary = subject.tokens(1, 2), subject.vocabularies[1]
    uniform = math.log(vocabulary)
    certain = torch.nn.functional.one_hot(labels, vocabulary).float()
    # Log-probabilities are logits too. A smoothed label does not ask for infinite certainty.
    best = min(float(loss((certain * 2.0**n).log_softmax(-1), labels)) for n in range(8))
    padded, hidden = labels.clone(), min(PADDED, labels.shape[1] // 2)
    padded[:, labels.shape[1] - hidden :] = subject.pad_id
    nothing = torch.zeros_like(certain).log_softmax(-1)
    full, part = float(loss(nothing, labels)), float(loss(nothing, padded))
    kept = 1 - hidden / labels.shape[1]
    ignored = min(abs(part - full), abs(part - full * kept)) < 1e-4 * max(1.0, full)
    said = f"{best:.2f} nats where all is certain and right, {full:.2f} of {uniform:.2f} where nothing is known"
    right = ignored and -1e-4 <= best < full / 2 and uniform / 2 < full < uniform * 1.5  # some take an entropy off
    return Answer(
        right,
        said if ignored else f"{said}, but {part:.2f} where {hidden} of {labels.shape[1]} labels are padding",
        "",
        "Padding is learnt, or the loss cannot say how good the model is.",
    )


def _at(tokens: Tensor, i: int, subject: Subject, side: int = 1) -> Tensor:
    """The same with another token at one place."""
    changed = tokens.clone()
    changed[:, i] = subject.other(tokens, side)[:, i]
    return changed


def _head(a: Tensor, length: int, cut: int) -> Tensor:
    """The first `cut` of the first dimension that has `length`."""
    dim = next((d for d, size in enumerate(a.shape) if size == length), None)
    return a if dim is None else a.narrow(dim, 0, cut)


def _first_apart(a: Seen, b: Seen, kept: Callable[[Tensor], Tensor], bound: float) -> str:
    """The first part whose outputs differ in what is kept of them."""
    for ours, theirs in zip(a.calls, b.calls, strict=False):
        for x, y in zip(ours.outputs, theirs.outputs, strict=False):
            if difference(kept(x), kept(y)) > bound * largest(x):
                return _name(ours.path)
    return ""


def _last_reached(a: Seen, b: Seen, subject: Subject) -> str:
    """The first part that is told of a change and does not pass it on."""

    def moved(x: list[Tensor], y: list[Tensor]) -> bool:
        return any(difference(p, q) > subject.bound * largest(p) for p, q in zip(x, y, strict=False))

    def lost(ours: Call, theirs: Call) -> bool:
        return moved(ours.inputs, theirs.inputs) and bool(ours.outputs) and not moved(ours.outputs, theirs.outputs)

    return next((_name(p.path) for p, q in zip(a.calls, b.calls, strict=False) if lost(p, q)), "")


def _name(path: str) -> str:
    return path or "the whole model"
