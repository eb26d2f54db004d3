"""One step of decoding, given the log-probabilities: what is not allowed, then the search or the draw.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...formulas.decoding import Steps
from ..xla_cpu.maxima import log_softmax
from .beam import ENDED
from .ngrams import forbid, repeats
from .sampling import sample
from .state import Search


def advance(
    search: Search, log_probs: Float[Array, "B K V"], src_tokens: Int[Array, "B S"], steps: Steps, eos_id: int
) -> tuple[Search, Int[Array, "B K"]]:
    """(the state one token later, index of each live hypothesis's parent)."""
    n = search.length + 1
    log_probs = jnp.where(_repeats(search, src_tokens, steps, log_probs.shape[-1]), -jnp.inf, log_probs)
    allowed = jnp.asarray(steps.allowed)[jnp.asarray(steps.kind)[n]]
    log_probs = jnp.where(allowed, jnp.where(jnp.asarray(steps.forced)[n], 0, log_probs), -jnp.inf)
    log_probs = log_softmax(log_probs) if steps.renormalize else log_probs
    if steps.sampling is not None:
        return sample(search, log_probs, steps, eos_id)
    return ENDED[steps.ended](search, search.sums[..., None] + log_probs, steps, eos_id)


def _repeats(
    search: Search, src_tokens: Int[Array, "B S"], steps: Steps, vocab_size: int
) -> Bool[Array, "B K V"] | Bool[Array, ""]:
    """Whether a token would repeat an n-gram of its hypothesis, or of the source."""
    count, forbidden = search.length + 1, jnp.zeros((), bool)
    if steps.ngram:
        completions = repeats(search.tokens, count, search.tokens, count, steps.ngram)
        forbidden = forbidden | forbid(completions, vocab_size)
    if steps.source_ngram:
        source = jnp.broadcast_to(src_tokens[:, None], (*search.sums.shape, src_tokens.shape[1]))
        completions = repeats(search.tokens, count, source, src_tokens.shape[1], steps.source_ngram)
        forbidden = forbidden | forbid(completions, vocab_size)
    return forbidden
