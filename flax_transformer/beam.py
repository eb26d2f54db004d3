"""The rule of beam search, as `configs.decoding.DecodingConfig` states it, whatever computes the log-probabilities.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..formulas.decoding import Steps


class Search(NamedTuple):
    """Where the search stands. Both kinds of hypotheses are sorted by score; -inf: there is none."""

    length: Int[Array, ""]  # n of those that go on
    tokens: Int[Array, "B K M+1"]  # those that go on, from the start token; padding after n
    sums: Float[Array, "B K"]  # of their log-probabilities
    finished: Int[Array, "B K M+1"]  # the best that ended
    scores: Float[Array, "B K"]  # sum / penalty(n)
    done: Bool[Array, " B"]  # no better one is looked for


def start(batch: int, beam_size: int, longest: int, start_id: int, pad_id: int, dtype: jnp.dtype) -> Search:
    """One hypothesis a sentence, of the start token alone."""
    tokens = jnp.full((batch, beam_size, longest + 1), pad_id, jnp.int32)
    none = jnp.full((batch, beam_size), -jnp.inf, dtype)
    first = tokens.at[:, :, 0].set(start_id)
    return Search(jnp.int32(0), first, none.at[:, 0].set(0), tokens, none, jnp.zeros(batch, bool))


def advance(
    search: Search, log_probs: Float[Array, "B K V"], steps: Steps, eos_id: int
) -> tuple[Search, Int[Array, "B K"]]:
    """(the search one token later, which hypothesis each of those that go on continues)."""
    n = search.length + 1
    allowed = jnp.asarray(steps.allowed)[jnp.asarray(steps.kind)[n]]
    log_probs = jnp.where(allowed, jnp.where(jnp.asarray(steps.forced)[n], 0, log_probs), -jnp.inf)
    return ENDED[steps.ended](search, search.sums[..., None] + log_probs, steps, eos_id)


def _leave(search: Search, sums: Float[Array, "B K V"], steps: Steps, eos_id: int) -> tuple[Search, Int[Array, "B K"]]:
    """Hypotheses that end leave the beam for a list of their own."""
    beam_size, n = sums.shape[1], search.length + 1
    penalty = jnp.asarray(steps.penalty, search.sums.dtype)[n]
    # The 2K best continuations: as each hypothesis can end but once, K of them go on.
    sums, parents, candidates = _best(search, sums, 2 * beam_size)
    ends = (candidates[:, :, n] == eos_id) | (n == len(steps.kind) - 1)

    enters = ends & may_finish(jnp.arange(2 * beam_size), beam_size) & ~search.done[:, None]
    pool = jnp.concatenate([search.scores, jnp.where(enters, sums / penalty, -jnp.inf)], axis=1)
    scores, best = jax.lax.top_k(pool, beam_size)
    finished = _pick(jnp.concatenate([search.finished, candidates], axis=1), best)

    live_sums, live = jax.lax.top_k(jnp.where(ends, -jnp.inf, sums), beam_size)
    done = search.done | settled(scores[:, -1], live_sums[:, 0] / penalty)
    return Search(n, _pick(candidates, live), live_sums, finished, scores, done), _pick(parents, live)


def _stay(search: Search, sums: Float[Array, "B K V"], steps: Steps, eos_id: int) -> tuple[Search, Int[Array, "B K"]]:
    """Hypotheses that end keep their place in the beam and grow on; done when all K have ended."""
    n, longest = search.length + 1, len(steps.kind) - 1
    sums, parents, candidates = _best(search, sums, sums.shape[1])
    ends = (candidates == eos_id) & (jnp.arange(longest + 1) > 0) & (jnp.arange(longest + 1) <= n)
    all_ended = (ends.any(-1) | (sums == -jnp.inf)).all(1)
    lengths = jnp.where(all_ended[:, None], jnp.argmax(ends, axis=-1), n)
    scores, best = jax.lax.top_k(sums / jnp.asarray(steps.penalty, sums.dtype)[lengths], sums.shape[1])
    closes = (all_ended | (n == longest)) & ~search.done
    finished = jnp.where(closes[:, None, None], _pick(candidates, best), search.finished)
    scores = jnp.where(closes[:, None], scores, search.scores)
    return Search(n, candidates, sums, finished, scores, search.done | closes), parents


# What hypotheses that ended do -> the search one token later, of the sums of all continuations
ENDED = {"leave": _leave, "stay": _stay}


def _best(
    search: Search, sums: Float[Array, "B K V"], number: int
) -> tuple[Float[Array, "B L"], Int[Array, "B L"], Int[Array, "B L _"]]:
    """(sums of the best continuations, which hypothesis each continues, their tokens)."""
    vocab_size = sums.shape[-1]
    sums, flat = jax.lax.top_k(sums.reshape(len(sums), -1), number)
    parents, tokens = flat // vocab_size, (flat % vocab_size).astype(jnp.int32)
    return sums, parents, _pick(search.tokens, parents).at[:, :, search.length + 1].set(tokens)


def may_finish(rank: Int[Array, " L"], beam_size: int) -> Bool[Array, " L"]:
    """Whether a continuation that ends counts, by its rank among all."""
    return rank < beam_size


def settled(worst_finished: Float[Array, " B"], best_live: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Whether no better hypothesis is looked for; both scores are over the penalty of the present length."""
    return worst_finished >= best_live


def _pick(values: Array, chosen: Int[Array, "B K"]) -> Array:
    """Of each sentence's hypotheses the chosen ones."""
    return jnp.take_along_axis(values, chosen.reshape(*chosen.shape, *[1] * (values.ndim - 2)), axis=1)
