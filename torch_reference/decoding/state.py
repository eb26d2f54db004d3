"""The state of decoding: the hypotheses of each sentence, finished or not.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Search(NamedTuple):
    """The state of a beam search. Live and finished hypotheses are sorted by score; -inf marks an empty slot."""

    length: int  # n of the live hypotheses
    tokens: Int[Tensor, "B K M+1"]  # live hypotheses, from the start token; padding after n
    sums: Float[Tensor, "B K"]  # their sums of log-probabilities
    finished: Int[Tensor, "B K M+1"]  # the best finished hypotheses
    scores: Float[Tensor, "B K"]  # their scores, sum / penalty(n)
    penalties: Float[Tensor, "B K"]  # their penalties
    done: Bool[Tensor, "B *G"]  # whether a sentence's search is finished; by group, if there are several
    draws: Float[Tensor, "B K _"]  # the uniform numbers of samples, by n; none in a search
    rules: Int[Tensor, "B _"]  # by n, as `formulas.sentence_rules` makes them; none without rules
    margins: Float[Tensor, " B"]  # smallest error of a sum, in nats, that would have changed a decision


def start(
    draws: Float[Tensor, "B K _"],
    rules: Int[Tensor, "B _"],
    groups: int,
    longest: int,
    start_id: int,
    pad_id: int,
    dtype: torch.dtype,
) -> Search:
    """The initial state: the start token, as one hypothesis per sentence and group, or as K samples."""
    (batch, beam_size, numbers), device = draws.shape, draws.device
    tokens = torch.full((batch, beam_size, longest + 1), pad_id, device=device)
    first = tokens.clone()
    first[:, :, 0] = start_id
    empty = torch.full((batch, beam_size), -torch.inf, dtype=dtype, device=device)
    sums = empty.clone()
    sums[:, :: 1 if numbers else beam_size // groups] = 0
    done = torch.zeros((batch, groups) if groups > 1 else batch, dtype=torch.bool, device=device)
    return Search(0, first, sums, tokens, empty, torch.ones_like(empty), done, draws, rules, -empty[:, 0])
