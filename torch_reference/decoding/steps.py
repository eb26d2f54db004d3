"""One step of decoding, given the log-probabilities: what is not allowed, then the search or the draw.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...formulas.decoding import Steps
from ...formulas.sentence_rules import NO_END
from .beam import ENDED
from .ngrams import forbid, repeats
from .sampling import sample
from .state import Search

_BY_HYPOTHESIS = ("tokens", "sums", "finished", "scores", "penalties")  # fields of `Search` with an axis K


def advance(
    search: Search, log_probs: Float[Tensor, "B K V"], src_tokens: Int[Tensor, "B S"], steps: Steps, eos_id: int
) -> Search:
    """The state one token later."""
    n = search.length + 1
    log_probs = log_probs.masked_fill(_repeats(search, src_tokens, steps, log_probs.shape[-1]), -torch.inf)
    if steps.forced[n]:
        log_probs = torch.zeros_like(log_probs)
    log_probs = log_probs.masked_fill(~torch.from_numpy(steps.allowed[steps.kind[n]]).to(log_probs.device), -torch.inf)
    if search.rules.shape[1]:
        rule, ids = search.rules[:, n, None, None], torch.arange(log_probs.shape[-1], device=log_probs.device)
        log_probs = log_probs.masked_fill((rule == NO_END) & (ids == eos_id), -torch.inf)
        log_probs = torch.where(rule < 0, log_probs, torch.where(ids == rule, 0, -torch.inf))
    log_probs = log_probs.log_softmax(-1) if steps.renormalize else log_probs
    if steps.sampling is not None:
        return sample(search, log_probs, steps, eos_id)
    if steps.groups > 1:
        return _advance_groups(search, log_probs, steps, eos_id)
    return ENDED[steps.ended](search, search.sums[..., None] + log_probs, steps, eos_id)


def _advance_groups(search: Search, log_probs: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """A step of each group in turn, which avoids the tokens that those before it have just taken."""
    n, size = search.length + 1, log_probs.shape[1] // steps.groups
    taken = torch.zeros_like(log_probs[:, 0])  # hypotheses of earlier groups, by their token
    groups = []
    for g in range(steps.groups):
        columns = slice(g * size, (g + 1) * size)
        done = search.done[:, g]
        group = search._replace(**{name: getattr(search, name)[:, columns] for name in _BY_HYPOTHESIS}, done=done)
        sums = group.sums[..., None] + log_probs[:, columns] - steps.diversity * taken[:, None]
        after = ENDED[steps.ended](group, sums, steps, eos_id)
        goes_on = ~done[:, None] & (after.sums > -torch.inf)
        taken.scatter_add_(1, after.tokens[:, :, n], goes_on.to(taken))
        groups.append(after)
    joined = {name: torch.cat([getattr(group, name) for group in groups], dim=1) for name in _BY_HYPOTHESIS}
    done, margins = torch.stack([group.done for group in groups], dim=1), torch.stack([g.margins for g in groups])
    return search._replace(length=n, **joined, done=done, margins=margins.amin(0))


def _repeats(
    search: Search, src_tokens: Int[Tensor, "B S"], steps: Steps, vocab_size: int
) -> Bool[Tensor, "B K V"] | Bool[Tensor, ""]:
    """Whether a token would repeat an n-gram of its hypothesis or of the source, or complete a forbidden sequence."""
    count, forbidden = search.length + 1, torch.zeros((), dtype=torch.bool, device=src_tokens.device)
    if steps.ngram:
        completions = repeats(search.tokens, count, search.tokens, count, steps.ngram)
        forbidden = forbidden | forbid(completions, vocab_size)
    if steps.source_ngram:
        source = src_tokens[:, None].expand(-1, search.sums.shape[1], -1)
        completions = repeats(search.tokens, count, source, src_tokens.shape[1], steps.source_ngram)
        forbidden = forbidden | forbid(completions, vocab_size)
    for *before, last in steps.sequences:
        if count >= len(before):  # the start token is at 0
            window = search.tokens[:, :, count - len(before) : count]
            ends = (window == window.new_tensor(before)).all(-1)
            forbidden = forbidden | (ends[..., None] & (torch.arange(vocab_size, device=ends.device) == last))
    return forbidden
