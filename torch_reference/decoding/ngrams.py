"""N-grams that a continuation would repeat.

Letters: B sentences, K beam size, V vocabulary, L length of a sequence, W n-grams in it.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def repeats(
    tokens: Int[Tensor, "B K M"], count: int, sequence: Int[Tensor, "B K L"], valid: int, size: int
) -> Int[Tensor, "B K W"]:
    """The tokens that would complete an n-gram of a sequence, one per n-gram; -1 for others.

    The hypotheses are the first `count` columns of `tokens`, and the sequences the first `valid` of `sequence`.

    Source: `transformers`, `NoRepeatNGramLogitsProcessor`.
    """
    before = size - 1
    windows = max(valid - before, 0) if count >= before else 0
    last = sequence[:, :, before : before + windows]
    matches = torch.ones_like(last, dtype=torch.bool)
    for i in range(before):
        end = tokens[:, :, count - before + i, None]
        matches = matches & (sequence[:, :, i : i + windows] == end)
    return torch.where(matches, last, -1)


def forbid(completions: Int[Tensor, "B K W"], vocab_size: int) -> Bool[Tensor, "B K V"]:
    """Whether each token is among the completions."""
    forbidden = torch.zeros(*completions.shape[:2], vocab_size + 1, dtype=torch.bool, device=completions.device)
    columns = torch.where(completions < 0, vocab_size, completions)
    return forbidden.scatter(2, columns, True)[..., :vocab_size]
