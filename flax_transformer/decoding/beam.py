"""One step of beam search, as `configs.decoding.DecodingConfig` defines it, given the sums of log-probabilities.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...formulas.decoding import Steps
from ..xla_cpu.maxima import top_k
from .state import Search


def _leave(search: Search, sums: Float[Array, "B K V"], steps: Steps, eos_id: int) -> tuple[Search, Int[Array, "B K"]]:
    """One step in which finished hypotheses leave the beam for a separate list."""
    beam_size, n = sums.shape[1], search.length + 1
    penalty = jnp.asarray(steps.penalty, search.sums.dtype)[n]
    # Of the 2K best continuations at most K emit EOS, one per hypothesis, so at least K stay live.
    sums, parents, candidates = _best(search, sums, 2 * beam_size)
    ends = (candidates[:, :, n] == eos_id) | (n == len(steps.kind) - 1)

    enters = ends & may_finish(jnp.arange(2 * beam_size), beam_size) & ~search.done[:, None]
    pool = jnp.concatenate([search.scores, jnp.where(enters, sums / penalty, -jnp.inf)], axis=1)
    scores, best = jax.lax.top_k(pool, beam_size)
    finished = _pick(jnp.concatenate([search.finished, candidates], axis=1), best)

    live_sums, indices = jax.lax.top_k(jnp.where(ends, -jnp.inf, sums), beam_size)
    done = search.done | settled(scores[:, -1], live_sums[:, 0] / penalty)
    done = done | (scores[:, -1] > -jnp.inf) if steps.early_stopping else done
    fields = {"tokens": _pick(candidates, indices), "sums": live_sums, "finished": finished, "scores": scores}
    return search._replace(length=n, **fields, done=done), _pick(parents, indices)


def _stay(search: Search, sums: Float[Array, "B K V"], steps: Steps, eos_id: int) -> tuple[Search, Int[Array, "B K"]]:
    """One step in which finished hypotheses stay in the beam and grow; done when all K contain EOS."""
    n, longest = search.length + 1, len(steps.kind) - 1
    sums, parents, candidates = _best(search, sums, sums.shape[1])
    ends = (candidates == eos_id) & (jnp.arange(longest + 1) > 0) & (jnp.arange(longest + 1) <= n)
    all_ended = (ends.any(-1) | (sums == -jnp.inf)).all(1)
    lengths = jnp.where(all_ended[:, None], jnp.argmax(ends, axis=-1), n)
    scores, best = jax.lax.top_k(sums / jnp.asarray(steps.penalty, sums.dtype)[lengths], sums.shape[1])
    closes = (all_ended | (n == longest)) & ~search.done
    finished = jnp.where(closes[:, None, None], _pick(candidates, best), search.finished)
    scores = jnp.where(closes[:, None], scores, search.scores)
    fields = {"tokens": candidates, "sums": sums, "finished": finished, "scores": scores}
    return search._replace(length=n, **fields, done=search.done | closes), parents


# `DecodingConfig.ended` -> one step of the search, given the sums of all continuations
ENDED = {"leave": _leave, "stay": _stay}


def _best(
    search: Search, sums: Float[Array, "B K V"], number: int
) -> tuple[Float[Array, "B L"], Int[Array, "B L"], Int[Array, "B L _"]]:
    """(sums of the best continuations, indices of their parents, their tokens)."""
    vocab_size = sums.shape[-1]
    sums, flat = top_k(sums, number)
    parents, tokens = flat // vocab_size, (flat % vocab_size).astype(jnp.int32)
    return sums, parents, _pick(search.tokens, parents).at[:, :, search.length + 1].set(tokens)


def may_finish(rank: Int[Array, " L"], beam_size: int) -> Bool[Array, " L"]:
    """Whether a continuation that emits EOS counts as finished, by its rank among all continuations."""
    return rank < beam_size


def settled(worst_finished: Float[Array, " B"], best_live: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Whether a sentence's search is finished; live scores use the penalty of the current length."""
    return worst_finished >= best_live


def _pick(values: Array, indices: Int[Array, "B K"]) -> Array:
    """The hypotheses at these indices, per sentence."""
    return jnp.take_along_axis(values, indices.reshape(*indices.shape, *[1] * (values.ndim - 2)), axis=1)
