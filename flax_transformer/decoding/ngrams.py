"""N-grams that a continuation would repeat.

Letters: B sentences, K beam size, V vocabulary, L length of a sequence, W n-grams in it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def repeats(
    tokens: Int[Array, "B K M"], count: Int[Array, ""], sequence: Int[Array, "B K L"], valid: int | Array, size: int
) -> Int[Array, "B K W"]:
    """The tokens that would complete an n-gram of a sequence, one per n-gram; -1 for others.

    The hypotheses are the first `count` columns of `tokens`, and the sequences the first `valid` of `sequence`.

    Source: `transformers`, `NoRepeatNGramLogitsProcessor`.
    """
    before = size - 1
    windows = sequence.shape[2] - before
    if windows <= 0 or before > tokens.shape[2]:  # n-grams longer than a sequence or any hypothesis
        return jnp.full((*tokens.shape[:2], 0), -1)
    matches = (jnp.arange(windows) + before < valid) & (count >= before)
    end = jax.lax.dynamic_slice_in_dim(tokens, jnp.maximum(count - before, 0), before, axis=2)
    for i in range(before):
        matches = matches & (sequence[:, :, i : i + windows] == end[:, :, i : i + 1])
    return jnp.where(matches, sequence[:, :, before:], -1)


def forbid(completions: Int[Array, "B K W"], vocab_size: int) -> Bool[Array, "B K V"]:
    """Whether each token is among the completions."""
    batch, beam_size, _ = completions.shape
    forbidden = jnp.zeros((batch, beam_size, vocab_size + 1), bool)
    columns = jnp.where(completions < 0, vocab_size, completions)
    rows, slots = jnp.arange(batch)[:, None, None], jnp.arange(beam_size)[None, :, None]
    return forbidden.at[rows, slots, columns].set(True)[..., :vocab_size]
