"""Cross entropy with label smoothing, whose gradient stores no (B, T, V) array of float32.

Letters: B batch, T target length, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...configs.training import TrainingConfig
from ...flax_transformer.module import at_least_float32
from ...flax_transformer.transposition import linear
from ...flax_transformer.xla_cpu.maxima import row_max
from ...formulas.label_smoothing import SMOOTHINGS, Target


def cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], pad_id: int, config: TrainingConfig
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """(sum of -sum_v q(v) log p(v) in nats, number of tokens), without padding.

    p = softmax(logits), q the smoothed label. Some smoothings subtract q's entropy from the sum.

    A label outside the vocabulary makes the sum NaN.

    Raises:
        ValueError: the labels are not integers of the logits' batch and length.
    Source: Szegedy et al. 2016, section 7; `formulas.label_smoothing`.
    """
    if labels.shape != logits.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels: must be integers of shape {list(logits.shape[:-1])}, not {labels.dtype}{list(labels.shape)}"
        )
    target = SMOOTHINGS[config.smoothing](config.label_smoothing, logits.shape[-1])
    keep = labels != pad_id
    losses: Any = _losses(logits, labels, pad_id, target)  # custom_jvp hides the type
    return jnp.where(keep, losses, 0).sum(), keep.sum()


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _losses(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], pad_id: int, target: Target
) -> Float[Array, "B T"]:
    """log sum_v exp(z_v) - sum_v q_v z_v - entropy, which is the cross entropy since q sums to 1."""
    return _forward(logits, labels, pad_id, target)[0]


def _forward(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], pad_id: int, target: Target
) -> tuple[Float[Array, "B T"], tuple[Array, ...]]:
    largest = row_max(at_least_float32(logits))  # subtracted first, for numerical stability
    z = at_least_float32(logits) - largest[..., None]
    normalizer = jnp.log(jnp.exp(z).sum(-1))
    # A label outside the vocabulary gives NaN; a negative index would wrap around.
    labels = jnp.where(labels < 0, z.shape[-1], labels)
    expected = (target.label - target.other) * jnp.take_along_axis(z, labels[..., None], axis=-1)[..., 0]
    # Terms of weight 0 are left out: a logit may be -inf.
    if target.padding != target.other:
        expected += (target.padding - target.other) * z[..., pad_id]
    if target.other:
        expected += target.other * z.sum(-1)
    # The residuals are the logits in their own dtype, not the probabilities in float32.
    return normalizer - expected - target.entropy, (logits, labels, largest, normalizer)


def _change(
    logits: Array, labels: Array, largest: Array, normalizer: Array, change: Array, *, pad_id: int, target: Target
) -> Float[Array, "B T"]:
    """sum_v (p_v - q_v) dz_v."""
    p = jnp.exp(at_least_float32(logits) - largest[..., None] - normalizer[..., None])
    token = jnp.arange(logits.shape[-1])
    q = jnp.where(token == pad_id, target.padding, target.other)
    q = jnp.where(token == labels[..., None], target.label, q)
    return ((p - q) * change).sum(-1)


_linear_change = linear(_change)


@_losses.defjvp
def _(pad_id: int, target: Target, primals: Any, tangents: Any) -> tuple[Array, Array]:
    logits, labels = primals
    losses, constants = _forward(logits, labels, pad_id, target)
    return losses, _linear_change(*constants, tangents[0], pad_id=pad_id, target=target)
