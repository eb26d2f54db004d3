"""The loss of an update: cross entropy, and the divergence of two passes of the same batch with different dropout.

Letters: B sentences, S source length, T target length, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...configs.training import TrainingConfig
from ...flax_transformer.dropout import SECOND_PASS, DropoutKey
from ...flax_transformer.model import Transformer
from ...flax_transformer.module import at_least_float32
from ...flax_transformer.transposition import linear
from ...flax_transformer.xla_cpu.maxima import log_softmax
from .losses import cross_entropy


def training_loss(
    model: Transformer,
    src_tokens: Int[Array, "B S"],
    tgt_tokens: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    key: DropoutKey,
    config: TrainingConfig,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """(sum of the losses in nats, number of tokens), without padding.

    CE(p, y) + α KL(p || c) in simcut; CE(p, y) + CE(q, y) + α/2 (KL(p || q) + KL(q || p)) in r_drop; else CE(p, y).
    p and q are the predictions of two passes with different dropout masks, c is q with cutoff, and α the config's
    `divergence_weight`. Gradients pass through both predictions.

    Source: Gao et al. 2022, "Bi-SimCut", section 3.2; Liang et al. 2021, "R-Drop", section 2.1.
    """
    pad_id = model.config.pad_id
    if config.consistency == "none":
        return cross_entropy(model(src_tokens, tgt_tokens, dropout_key=key), labels, pad_id, config)
    first, second = _two_passes(model, src_tokens, tgt_tokens, key, config)
    total, tokens = cross_entropy(first, labels, pad_id, config)
    if config.consistency == "simcut":
        divergence = divergences(first, second)
    else:
        total += cross_entropy(second, labels, pad_id, config)[0]
        divergence = (divergences(first, second) + divergences(second, first)) / 2
    return total + config.divergence_weight * jnp.where(labels != pad_id, divergence, 0).sum(), tokens


def _two_passes(
    model: Transformer, src_tokens: Array, tgt_tokens: Array, key: DropoutKey, config: TrainingConfig
) -> tuple[Float[Array, "B T V"], Float[Array, "B T V"]]:
    """The logits of both passes, computed in one: compiling two takes twice as long.

    The rows of a sentence follow each other, so that both are on its device.
    """
    rows = jnp.stack([key.rows, key.rows + SECOND_PASS], axis=1).reshape(-1)
    cutoff = config.cutoff if config.consistency == "simcut" else None
    src_tokens, tgt_tokens = (jnp.repeat(tokens, 2, axis=0) for tokens in (src_tokens, tgt_tokens))
    logits = model(src_tokens, tgt_tokens, dropout_key=key._replace(rows=rows, cutoff=cutoff))
    logits = logits.reshape(-1, 2, *logits.shape[1:])
    return logits[:, 0], logits[:, 1]


@jax.custom_jvp
def divergences(first: Float[Array, "B T V"], second: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) in nats, of p = softmax(first) and q = softmax(second)."""
    return _forward(first, second)[0]


def _forward(first: Array, second: Array) -> tuple[Float[Array, "B T"], tuple[Array, ...]]:
    log_p, log_q = _log_softmax(first), _log_softmax(second)
    p = jnp.exp(log_p)
    divergence = jnp.where(p > 0, p * (log_p - log_q), 0).sum(-1)
    # The residuals are the logits in their own dtype, not the probabilities in float32.
    return divergence, (first, second, divergence)


def _change_with_first(first: Array, second: Array, divergence: Array, change: Array) -> Float[Array, "B T"]:
    """sum_v p_v (log p_v - log q_v - KL) times the change."""
    log_p, log_q = _log_softmax(first), _log_softmax(second)
    p = jnp.exp(log_p)
    return (jnp.where(p > 0, p * (log_p - log_q - divergence[..., None]), 0) * change).sum(-1)


def _change_with_second(first: Array, second: Array, change: Array) -> Float[Array, "B T"]:
    """sum_v (q_v - p_v) times the change."""
    return ((jnp.exp(_log_softmax(second)) - jnp.exp(_log_softmax(first))) * change).sum(-1)


_with_first, _with_second = linear(_change_with_first), linear(_change_with_second)


@divergences.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    divergence, constants = _forward(*primals)
    return divergence, _with_first(*constants, tangents[0]) + _with_second(*primals, tangents[1])


def _log_softmax(logits: Array) -> Any:
    return log_softmax(at_least_float32(logits))
