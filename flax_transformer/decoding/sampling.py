"""One step of sampling, as `configs.decoding.SamplingConfig` defines it, given the log-probabilities.

Letters: B sentences, K samples of each, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...configs.decoding import SamplingConfig
from ...formulas.decoding import Steps
from ..xla_cpu.maxima import log_softmax, row_max, top_k
from .state import Search


def sample(
    search: Search, log_probs: Float[Array, "B K V"], steps: Steps, eos_id: int
) -> tuple[Search, Int[Array, "B K"]]:
    """(the state one token later, index of each hypothesis: samples do not mix)."""
    assert steps.sampling is not None
    n = search.length + 1
    token = draw(filtered(log_probs, steps.sampling), search.draws[:, :, n])
    sums = search.sums + jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0]
    tokens = search.tokens.at[:, :, n].set(token)
    ends = ((token == eos_id) | (n == len(steps.kind) - 1)) & (search.scores == -jnp.inf)
    finished = jnp.where(ends[..., None], tokens, search.finished)
    scores = jnp.where(ends, sums / jnp.asarray(steps.penalty, sums.dtype)[n], search.scores)
    done = (scores != -jnp.inf).all(1)
    parents = jnp.broadcast_to(jnp.arange(token.shape[1], dtype=jnp.int32), token.shape)
    fields = {"tokens": tokens, "sums": sums, "finished": finished, "scores": scores, "done": done}
    return search._replace(length=n, **fields), parents


def filtered(log_probs: Float[Array, "B K V"], sampling: SamplingConfig) -> Float[Array, "B K V"]:
    """The normalized log-probabilities of what may be drawn; -inf for the other tokens."""
    q = log_softmax(log_probs / sampling.temperature)
    if sampling.top_k:
        rows = q.reshape(-1, 1, q.shape[-1])
        smallest = top_k(rows, min(sampling.top_k, q.shape[-1]))[0][:, -1]
        q = _keep(q, q >= smallest.reshape(*q.shape[:-1], 1))
    if sampling.top_p < 1:
        q = _keep(q, _first(jnp.exp(q), -q, sampling.top_p))
    if sampling.min_p:
        p = jnp.exp(q)
        q = _keep(q, p >= sampling.min_p * row_max(p)[..., None])
    if sampling.typical_p < 1:
        p = jnp.exp(q)
        entropy = -jnp.where(p > 0, p * q, 0).sum(-1, keepdims=True)
        q = _keep(q, _first(p, jnp.abs(-q - entropy), sampling.typical_p))
    return q


def draw(q: Float[Array, "B K V"], uniform: Float[Array, "B K"]) -> Int[Array, "B K"]:
    """The first token v with p_0 + ... + p_v > u, among those with p_v > 0."""
    p = jnp.exp(q)
    sums = jnp.where(p > 0, jnp.cumsum(p, axis=-1), -jnp.inf)
    border = uniform.astype(p.dtype) * row_max(sums)  # not 1, because sums are rounded
    return jnp.argmax(sums > border[..., None], axis=-1).astype(jnp.int32)


def _keep(q: Float[Array, "B K V"], keep: Bool[Array, "B K V"]) -> Float[Array, "B K V"]:
    return log_softmax(jnp.where(keep, q, -jnp.inf))


def _first(p: Float[Array, "B K V"], order: Float[Array, "B K V"], mass: float) -> Bool[Array, "B K V"]:
    """Whether the tokens before this one in `order`, which is not negative, have less than `mass` together.

    A bisection of the order at which the sum reaches the mass: XLA sorts slowly on a CPU. Numbers that are not negative
    have the order of the integers with the same bits.
    """
    bits, integer = (31, jnp.int32) if order.dtype == jnp.float32 else (63, jnp.int64)
    places = jax.lax.bitcast_convert_type(jnp.maximum(order, 0), integer)
    infinite = jax.lax.bitcast_convert_type(jnp.array(jnp.inf, order.dtype), integer)

    def halve(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = low + (high - low) // 2
        enough = jnp.where(places <= middle[..., None], p, 0).sum(-1) >= mass
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros(p.shape[:-1], integer)
    last = jax.lax.fori_loop(0, bits, halve, (low, jnp.full_like(low, infinite)))[1]
    return places <= last[..., None]
