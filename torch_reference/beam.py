"""The rule of beam search, as `configs.decoding.DecodingConfig` states it, whatever computes the log-probabilities.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..formulas.decoding import Steps


class Search(NamedTuple):
    """Where the search stands. Both kinds of hypotheses are sorted by score; -inf: there is none."""

    length: int  # n of those that go on
    tokens: Int[Tensor, "B K M+1"]  # those that go on, from the start token; padding after n
    sums: Float[Tensor, "B K"]  # of their log-probabilities
    finished: Int[Tensor, "B K M+1"]  # the best that ended
    scores: Float[Tensor, "B K"]  # sum / penalty(n)
    penalties: Float[Tensor, "B K"]  # of these
    done: Bool[Tensor, " B"]  # no better one is looked for
    margins: Float[Tensor, " B"]  # the smallest error of a sum, in nats, that would have turned a decision


def start(
    batch: int, beam_size: int, longest: int, start_id: int, pad_id: int, dtype: torch.dtype, device: torch.device
) -> Search:
    """One hypothesis a sentence, of the start token alone."""
    tokens = torch.full((batch, beam_size, longest + 1), pad_id, device=device)
    first = tokens.clone()
    first[:, :, 0] = start_id
    none = torch.full((batch, beam_size), -torch.inf, dtype=dtype, device=device)
    sums = none.clone()
    sums[:, 0] = 0
    done = torch.zeros_like(none[:, 0], dtype=torch.bool)
    return Search(0, first, sums, tokens, none, torch.ones_like(none), done, -none[:, 0])


def advance(search: Search, log_probs: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """The search one token later."""
    n = search.length + 1
    if steps.forced[n]:
        log_probs = torch.zeros_like(log_probs)
    log_probs = log_probs.masked_fill(~torch.from_numpy(steps.allowed[steps.kind[n]]).to(log_probs.device), -torch.inf)
    return ENDED[steps.ended](search, search.sums[..., None] + log_probs, steps, eos_id)


def _leave(search: Search, sums: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """Hypotheses that end leave the beam for a list of their own."""
    beam_size, n = sums.shape[1], search.length + 1
    penalty = float(steps.penalty[n])
    # The 2K best continuations: as each hypothesis can end but once, K of them go on.
    all_sums, candidates = _best(search, sums, 2 * beam_size)
    sums = all_sums[:, : 2 * beam_size]
    ends = (candidates[:, :, n] == eos_id) | (n == len(steps.kind) - 1)

    enters = ends & may_finish(torch.arange(2 * beam_size, device=ends.device), beam_size) & ~search.done[:, None]
    pool = torch.cat([search.scores, torch.where(enters, sums / penalty, -torch.inf)], dim=1)
    pool, best = _sort(pool)
    penalties = torch.cat([search.penalties, torch.full_like(sums, penalty)], dim=1).gather(1, best)
    scores = pool[:, :beam_size]
    finished = _pick(torch.cat([search.finished, candidates], dim=1), best[:, :beam_size])

    going_on, live = _sort(torch.where(ends, -torch.inf, sums))
    live_sums, best_live = going_on[:, :beam_size], going_on[:, 0] / penalty
    done = search.done | settled(scores[:, -1], best_live)

    # Two sorted neighbours, the first of which was taken: into the pool or not, to go on or not, to be given back
    # before or after; and the comparison that ends the search.
    one = torch.ones_like(all_sums)
    ending = torch.stack([penalties[:, beam_size - 1], torch.full_like(best_live, penalty)], dim=1)
    decisions = [
        _margin(all_sums, one, beam_size - 1, beam_size + 1),
        _margin(all_sums, one, 2 * beam_size - 1, 2 * beam_size + 1),
        _margin(going_on, one, beam_size - 1, beam_size + 1),
        _margin(pool, penalties, 0, beam_size + 1),
        _margin(torch.stack([scores[:, -1], best_live], dim=1), ending, 0, 2),
    ]
    tokens, margins = _pick(candidates, live[:, :beam_size]), _closest(search, decisions)
    return Search(n, tokens, live_sums, finished, scores, penalties[:, :beam_size], done, margins)


def _stay(search: Search, sums: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """Hypotheses that end keep their place in the beam and grow on; done when all K have ended."""
    beam_size, n, longest = sums.shape[1], search.length + 1, len(steps.kind) - 1
    all_sums, candidates = _best(search, sums, beam_size)
    sums = all_sums[:, :beam_size]
    ends = candidates[:, :, 1 : n + 1] == eos_id
    all_ended = (ends.any(-1) | (sums == -torch.inf)).all(1)
    lengths = torch.where(all_ended[:, None], ends.int().argmax(-1) + 1, n)
    penalties = torch.from_numpy(steps.penalty).to(sums)[lengths]
    scores, best = _sort(sums / penalties)
    penalties = penalties.gather(1, best)
    closes = (all_ended | torch.tensor(n == longest, device=ends.device)) & ~search.done
    finished = torch.where(closes[:, None, None], _pick(candidates, best), search.finished)

    # Two sorted neighbours: in the beam or not, and at the end to be given back before or after.
    last = torch.where(closes, _margin(scores, penalties, 0, beam_size), torch.inf)
    decisions = [_margin(all_sums, torch.ones_like(all_sums), beam_size - 1, beam_size + 1), last]
    scores, penalties = (
        torch.where(closes[:, None], *pair) for pair in ((scores, search.scores), (penalties, search.penalties))
    )
    margins, done = _closest(search, decisions), search.done | closes
    return Search(n, candidates, sums, finished, scores, penalties, done, margins)


# What hypotheses that ended do -> the search one token later, of the sums of all continuations
ENDED = {"leave": _leave, "stay": _stay}


def _best(search: Search, sums: Float[Tensor, "B K V"], number: int) -> tuple[Tensor, Int[Tensor, "B L _"]]:
    """(sums of all continuations, descending; tokens of the best of them)."""
    vocab_size = sums.shape[-1]
    all_sums, flat = _sort(sums.flatten(1))
    flat = flat[:, :number]
    candidates = _pick(search.tokens, flat // vocab_size)
    candidates[:, :, search.length + 1] = flat % vocab_size
    return all_sums, candidates


def _closest(search: Search, decisions: list[Float[Tensor, " B"]]) -> Float[Tensor, " B"]:
    """The smallest margin so far, of sentences that are not done."""
    return torch.where(search.done, search.margins, torch.stack([search.margins, *decisions]).amin(0))


def may_finish(rank: Int[Tensor, " L"], beam_size: int) -> Bool[Tensor, " L"]:
    """Whether a continuation that ends counts, by its rank among all."""
    return rank < beam_size


def settled(worst_finished: Float[Tensor, " B"], best_live: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether no better hypothesis is looked for; both scores are over the penalty of the present length."""
    return worst_finished >= best_live


def _sort(values: Float[Tensor, "B L"]) -> tuple[Tensor, Tensor]:
    """(descending values, their indices); of equals the first comes first, which `torch.topk` does not promise."""
    return torch.sort(values, dim=1, descending=True, stable=True)


def _pick(values: Tensor, chosen: Int[Tensor, "B L"]) -> Tensor:
    """Of each sentence's hypotheses the chosen ones."""
    return values.gather(1, chosen[..., None].expand(-1, -1, values.shape[-1]))


def _margin(values: Float[Tensor, "B L"], penalties: Tensor, first: int, last: int) -> Float[Tensor, " B"]:
    """The error of both sums that makes two neighbours of these columns equal, where values are sums over penalties.

    |a / p - b / q| / (1 / p + 1 / q); inf where one of them is not there.
    """
    values, shares = values[:, first:last], 1 / penalties[:, first:last]
    errors = (values[:, 1:] - values[:, :-1]).abs() / (shares[:, 1:] + shares[:, :-1])
    errors = torch.where(errors.isfinite(), errors, torch.inf)
    return errors.amin(1) if errors.shape[1] else torch.full_like(values[:, 0], torch.inf)
