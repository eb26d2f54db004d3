"""One step of decoding, given the log-probabilities: what is not allowed, then the search or the draw.

Letters: B sentences, K beam size, V vocabulary, M longest hypothesis; n is the length of a hypothesis.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...formulas.decoding import Steps
from ...formulas.sentence_rules import NO_END
from ..xla_cpu.maxima import log_softmax
from .beam import ENDED
from .ngrams import forbid, repeats
from .sampling import sample
from .state import Search

_BY_HYPOTHESIS = ("tokens", "sums", "finished", "scores")  # fields of `Search` with an axis K


def advance(
    search: Search, log_probs: Float[Array, "B K V"], src_tokens: Int[Array, "B S"], steps: Steps, eos_id: int
) -> tuple[Search, Int[Array, "B K"]]:
    """(the state one token later, index of each live hypothesis's parent)."""
    n = search.length + 1
    log_probs = jnp.where(_repeats(search, src_tokens, steps, log_probs.shape[-1]), -jnp.inf, log_probs)
    allowed = jnp.asarray(steps.allowed)[jnp.asarray(steps.kind)[n]]
    log_probs = jnp.where(allowed, jnp.where(jnp.asarray(steps.forced)[n], 0, log_probs), -jnp.inf)
    if search.rules.shape[1]:
        rule, ids = search.rules[:, n, None, None], jnp.arange(log_probs.shape[-1])
        log_probs = jnp.where((rule == NO_END) & (ids == eos_id), -jnp.inf, log_probs)
        log_probs = jnp.where(rule < 0, log_probs, jnp.where(ids == rule, 0, -jnp.inf))
    log_probs = log_softmax(log_probs) if steps.renormalize else log_probs
    if steps.sampling is not None:
        return sample(search, log_probs, steps, eos_id)
    if steps.groups > 1:
        return _advance_groups(search, log_probs, steps, eos_id)
    return ENDED[steps.ended](search, search.sums[..., None] + log_probs, steps, eos_id)


def _advance_groups(
    search: Search, log_probs: Float[Array, "B K V"], steps: Steps, eos_id: int
) -> tuple[Search, Int[Array, "B K"]]:
    """A step of each group in turn, which avoids the tokens that those before it have just taken."""
    n, size = search.length + 1, log_probs.shape[1] // steps.groups
    taken = jnp.zeros(log_probs[:, 0].shape, log_probs.dtype)  # hypotheses of earlier groups, by their token
    groups, all_parents = [], []
    for g in range(steps.groups):
        columns = slice(g * size, (g + 1) * size)
        done = search.done[:, g]
        parts = {name: getattr(search, name)[:, columns] for name in _BY_HYPOTHESIS}
        group = search._replace(**parts, done=done)
        sums = group.sums[..., None] + log_probs[:, columns] - steps.diversity * taken[:, None]
        after, parents = ENDED[steps.ended](group, sums, steps, eos_id)
        tokens = jnp.where(done[:, None] | (after.sums == -jnp.inf), -1, after.tokens[:, :, n])
        taken += jax.nn.one_hot(tokens, taken.shape[-1], dtype=taken.dtype).sum(1)
        groups.append(after)
        all_parents.append(parents + g * size)
    joined = {name: jnp.concatenate([getattr(group, name) for group in groups], axis=1) for name in _BY_HYPOTHESIS}
    done = jnp.stack([group.done for group in groups], axis=1)
    return search._replace(length=n, **joined, done=done), jnp.concatenate(all_parents, axis=1)


def _repeats(
    search: Search, src_tokens: Int[Array, "B S"], steps: Steps, vocab_size: int
) -> Bool[Array, "B K V"] | Bool[Array, ""]:
    """Whether a token would repeat an n-gram of its hypothesis or of the source, or complete a forbidden sequence."""
    count, forbidden = search.length + 1, jnp.zeros((), bool)
    if steps.ngram:
        completions = repeats(search.tokens, count, search.tokens, count, steps.ngram)
        forbidden = forbidden | forbid(completions, vocab_size)
    if steps.source_ngram:
        source = jnp.broadcast_to(src_tokens[:, None], (*search.sums.shape, src_tokens.shape[1]))
        completions = repeats(search.tokens, count, source, src_tokens.shape[1], steps.source_ngram)
        forbidden = forbidden | forbid(completions, vocab_size)
    for *before, last in steps.sequences:
        first = count - len(before)  # where the sequence would begin, the start token is at 0
        window = jax.lax.dynamic_slice_in_dim(search.tokens, jnp.maximum(first, 0), len(before), axis=2)
        ends = (window == jnp.array(before, jnp.int32)).all(-1) & (first >= 0)
        forbidden = forbidden | (ends[..., None] & (jnp.arange(vocab_size) == last))
    return forbidden
