"""One step of sampling, as `configs.decoding.SamplingConfig` defines it, given the log-probabilities.

Letters: B sentences, K samples of each, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...configs.decoding import SamplingConfig
from ...formulas.decoding import Steps
from .state import Search


def sample(search: Search, log_probs: Float[Tensor, "B K V"], steps: Steps, eos_id: int) -> Search:
    """The state one token later."""
    assert steps.sampling is not None
    n, penalty = search.length + 1, float(steps.penalty[search.length + 1])
    q, uniform = filtered(log_probs, steps.sampling), search.draws[:, :, n]
    token = draw(q, uniform)
    sums = search.sums + log_probs.gather(-1, token[..., None])[..., 0]
    tokens = search.tokens.clone()
    tokens[:, :, n] = token
    ends = ((token == eos_id) | (n == len(steps.kind) - 1)) & (search.scores == -torch.inf)
    finished = torch.where(ends[..., None], tokens, search.finished)
    scores = torch.where(ends, sums / penalty, search.scores)
    # A draw changes if an error of the log-probabilities moves a border of the cumulative distribution over it.
    gaps = (q.exp().cumsum(-1) - uniform[..., None]).abs().amin(-1)
    margins = torch.minimum(search.margins, torch.where(search.scores == -torch.inf, gaps, torch.inf).amin(1))
    done = (scores != -torch.inf).all(1)
    fields = {"tokens": tokens, "sums": sums, "finished": finished, "scores": scores, "done": done}
    return search._replace(length=n, **fields, margins=margins)


def filtered(log_probs: Float[Tensor, "B K V"], sampling: SamplingConfig) -> Float[Tensor, "B K V"]:
    """The normalized log-probabilities of what may be drawn; -inf for the other tokens."""
    q = (log_probs / sampling.temperature).log_softmax(-1)
    if sampling.top_k:
        smallest = q.topk(min(sampling.top_k, q.shape[-1])).values[..., -1:]
        q = _keep(q, q >= smallest)
    if sampling.top_p < 1:
        q = _keep(q, _first(q.exp(), -q, sampling.top_p))
    if sampling.min_p:
        p = q.exp()
        q = _keep(q, p >= sampling.min_p * p.amax(-1, keepdim=True))
    if sampling.typical_p < 1:
        p = q.exp()
        entropy = -torch.where(p > 0, p * q, 0).sum(-1, keepdim=True)
        q = _keep(q, _first(p, (-q - entropy).abs(), sampling.typical_p))
    return q


def draw(q: Float[Tensor, "B K V"], uniform: Float[Tensor, "B K"]) -> Int[Tensor, "B K"]:
    """The first token v with p_0 + ... + p_v > u, among those with p_v > 0."""
    p = q.exp()
    sums = p.cumsum(-1).masked_fill(p == 0, -torch.inf)
    border = uniform[..., None] * sums.amax(-1, keepdim=True)  # not 1, because sums are rounded
    return (sums > border).int().argmax(-1)


def _keep(q: Float[Tensor, "B K V"], keep: Bool[Tensor, "B K V"]) -> Float[Tensor, "B K V"]:
    return q.masked_fill(~keep, -torch.inf).log_softmax(-1)


def _first(p: Float[Tensor, "B K V"], order: Float[Tensor, "B K V"], mass: float) -> Bool[Tensor, "B K V"]:
    """Whether the tokens before this one in `order` have less than `mass` together."""
    values, indices = order.sort(-1)
    enough = p.gather(-1, indices).cumsum(-1) >= mass
    enough[..., -1] = True  # sums are rounded
    return order <= values.gather(-1, enough.int().argmax(-1, keepdim=True))
