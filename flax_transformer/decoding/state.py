"""The state of decoding: the hypotheses of each sentence, finished or not.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Search(NamedTuple):
    """The state of a beam search. Live and finished hypotheses are sorted by score; -inf marks an empty slot."""

    length: Int[Array, ""]  # n of the live hypotheses
    tokens: Int[Array, "B K M+1"]  # live hypotheses, from the start token; padding after n
    sums: Float[Array, "B K"]  # their sums of log-probabilities
    finished: Int[Array, "B K M+1"]  # the best finished hypotheses
    scores: Float[Array, "B K"]  # their scores, sum / penalty(n)
    done: Bool[Array, "B *G"]  # whether a sentence's search is finished; by group, if there are several
    draws: Float[Array, "B K _"]  # the uniform numbers of samples, by n; none in a search
    rules: Int[Array, "B _"]  # by n, as `formulas.sentence_rules` makes them; none without rules

    @property
    def settled(self) -> Bool[Array, " B"]:
        """Whether a sentence's search is finished, in all groups."""
        return self.done.reshape(len(self.done), -1).all(1)


def start(
    draws: Float[Array, "B K _"],
    rules: Int[Array, "B _"],
    groups: int,
    longest: int,
    start_id: int,
    pad_id: int,
    dtype: jnp.dtype,
) -> Search:
    """The initial state: the start token, as one hypothesis per sentence and group, or as K samples."""
    batch, beam_size, numbers = draws.shape
    tokens = jnp.full((batch, beam_size, longest + 1), pad_id, jnp.int32)
    empty = jnp.full((batch, beam_size), -jnp.inf, dtype)
    first = tokens.at[:, :, 0].set(start_id)
    sums = empty.at[:, :: 1 if numbers else beam_size // groups].set(0)
    done = jnp.zeros((batch, groups) if groups > 1 else batch, bool)
    return Search(jnp.int32(0), first, sums, tokens, empty, done, draws, rules)
