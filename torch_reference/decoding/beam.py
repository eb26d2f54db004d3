"""One step of beam search, as `configs.decoding.DecodingConfig` defines it, given the sums of log-probabilities.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...formulas.decoding import Steps
from .state import Search


def _leave(search: Search, sums: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """One step in which finished hypotheses leave the beam for a separate list."""
    beam_size, n = sums.shape[1], search.length + 1
    penalty = float(steps.penalty[n])
    # Of the 2K best continuations at most K emit EOS, one per hypothesis, so at least K stay live.
    all_sums, candidates = _best(search, sums, 2 * beam_size)
    sums = all_sums[:, : 2 * beam_size]
    ends = (candidates[:, :, n] == eos_id) | (n == len(steps.kind) - 1)

    enters = ends & may_finish(torch.arange(2 * beam_size, device=ends.device), beam_size) & ~search.done[:, None]
    pool = torch.cat([search.scores, torch.where(enters, sums / penalty, -torch.inf)], dim=1)
    pool, best = _sort(pool)
    penalties = torch.cat([search.penalties, torch.full_like(sums, penalty)], dim=1).gather(1, best)
    scores = pool[:, :beam_size]
    finished = _pick(torch.cat([search.finished, candidates], dim=1), best[:, :beam_size])

    unfinished_sums, indices = _sort(torch.where(ends, -torch.inf, sums))
    live_sums, best_live = unfinished_sums[:, :beam_size], unfinished_sums[:, 0] / penalty
    done = search.done | settled(scores[:, -1], best_live)
    done = done | (scores[:, -1] > -torch.inf) if steps.early_stopping else done

    # Each decision compares two sorted neighbors: which continuations may finish, which are candidates, which stay
    # live, in which order finished hypotheses are returned; and whether the search stops.
    ones = torch.ones_like(all_sums)
    stop_penalties = torch.stack([penalties[:, beam_size - 1], torch.full_like(best_live, penalty)], dim=1)
    decisions = [
        _margin(all_sums, ones, beam_size - 1, beam_size + 1),
        _margin(all_sums, ones, 2 * beam_size - 1, 2 * beam_size + 1),
        _margin(unfinished_sums, ones, beam_size - 1, beam_size + 1),
        _margin(pool, penalties, 0, beam_size + 1),
        _margin(torch.stack([scores[:, -1], best_live], dim=1), stop_penalties, 0, 2),
    ]
    tokens = _pick(candidates, indices[:, :beam_size])
    margins = _closest(search, decisions)
    fields = {"tokens": tokens, "sums": live_sums, "finished": finished, "scores": scores, "done": done}
    return search._replace(length=n, **fields, penalties=penalties[:, :beam_size], margins=margins)


def _stay(search: Search, sums: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """One step in which finished hypotheses stay in the beam and grow; done when all K contain EOS."""
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

    # Each decision compares two sorted neighbors: which continuations stay in the beam, and the final order.
    order = torch.where(closes, _margin(scores, penalties, 0, beam_size), torch.inf)
    decisions = [_margin(all_sums, torch.ones_like(all_sums), beam_size - 1, beam_size + 1), order]
    scores, penalties = (
        torch.where(closes[:, None], *pair) for pair in ((scores, search.scores), (penalties, search.penalties))
    )
    margins = _closest(search, decisions)
    fields = {"tokens": candidates, "sums": sums, "finished": finished, "scores": scores, "penalties": penalties}
    return search._replace(length=n, **fields, done=search.done | closes, margins=margins)


# `DecodingConfig.ended` -> one step of the search, given the sums of all continuations
ENDED = {"leave": _leave, "stay": _stay}


def _best(search: Search, sums: Float[Tensor, "B K V"], number: int) -> tuple[Tensor, Int[Tensor, "B L _"]]:
    """(sums of all continuations in descending order, tokens of the best ones)."""
    vocab_size = sums.shape[-1]
    all_sums, flat = _sort(sums.flatten(1))
    flat = flat[:, :number]
    candidates = _pick(search.tokens, flat // vocab_size)
    candidates[:, :, search.length + 1] = flat % vocab_size
    return all_sums, candidates


def _closest(search: Search, decisions: list[Float[Tensor, " B"]]) -> Float[Tensor, " B"]:
    """The smallest margins so far; those of finished sentences are kept."""
    return torch.where(search.done, search.margins, torch.stack([search.margins, *decisions]).amin(0))


def may_finish(rank: Int[Tensor, " L"], beam_size: int) -> Bool[Tensor, " L"]:
    """Whether a continuation that emits EOS counts as finished, by its rank among all continuations."""
    return rank < beam_size


def settled(worst_finished: Float[Tensor, " B"], best_live: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether a sentence's search is finished; live scores use the penalty of the current length."""
    return worst_finished >= best_live


def _sort(values: Float[Tensor, "B L"]) -> tuple[Tensor, Tensor]:
    """(values in descending order, their indices). The sort is stable; `torch.topk` does not guarantee that."""
    return torch.sort(values, dim=1, descending=True, stable=True)


def _pick(values: Tensor, indices: Int[Tensor, "B L"]) -> Tensor:
    """The hypotheses at these indices, per sentence."""
    return values.gather(1, indices[..., None].expand(-1, -1, values.shape[-1]))


def _margin(values: Float[Tensor, "B L"], penalties: Tensor, first: int, last: int) -> Float[Tensor, " B"]:
    """The smallest error of the sums that makes two neighboring columns equal; values are sums over penalties.

    |a / p - b / q| / (1 / p + 1 / q); inf if one of them is empty.
    """
    values, shares = values[:, first:last], 1 / penalties[:, first:last]
    errors = (values[:, 1:] - values[:, :-1]).abs() / (shares[:, 1:] + shares[:, :-1])
    errors = torch.where(errors.isfinite(), errors, torch.inf)
    return errors.amin(1) if errors.shape[1] else torch.full_like(values[:, 0], torch.inf)
