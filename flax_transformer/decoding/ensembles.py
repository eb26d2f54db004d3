"""The distribution of several models: the mean of theirs. Letters: B sentences, K hypotheses, V vocabulary."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Float

from ..xla_cpu.maxima import log_softmax


def combine(log_probs: Sequence[Float[Array, "B K V"]], log_linear: bool) -> Float[Array, "B K V"]:
    """log of the mean probability over the models; `log_linear`: the mean log-probability, normalized."""
    if len(log_probs) == 1:
        return log_probs[0]
    stacked = jnp.stack(log_probs)
    return log_softmax(stacked.mean(0)) if log_linear else logsumexp(stacked, axis=0) - jnp.log(len(log_probs))
