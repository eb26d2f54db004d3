"""Multi-head attention and its masks.

Letters: B batch, T query length, S key length, D d_model, N heads, H width of a query/key head, U of a value head.
Masks are boolean, True = attend.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..configs.schema import TransformerConfig
from .dropout import Dropout, DropoutKey
from .execution import Executed
from .fused_attention import fused_attention
from .layers import Linear
from .module import at_least_float32, record
from .xla_cpu.maxima import softmax


class KeysValues(NamedTuple):
    """The keys and values of an attention, in the layouts of its products, so that decoding does not transpose them."""

    keys: Float[Array, "B N H S"]
    values: Float[Array, "B N S U"]


class MultiHeadAttention(Executed):
    """concat_n(softmax(q_n · k_n / sqrt(H) + bias_n) v_n) Wo, with q = x Wq, k = memory Wk, v = memory Wv.

    Source: Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, *, rngs: nnx.Rngs):
        self.config, self.num_heads = config, num_heads
        query_key = num_heads * config.query_key_width(num_heads)
        value = num_heads * config.value_width(num_heads)
        self.q_proj = Linear(config, config.d_model, query_key, config.q_proj_bias, rngs, num_heads, "query")
        self.k_proj = Linear(config, config.d_model, query_key, config.k_proj_bias, rngs, num_heads)
        self.v_proj = Linear(config, config.d_model, value, config.v_proj_bias, rngs, num_heads)
        self.out_proj = Linear(config, value, config.d_model, config.out_proj_bias, rngs)
        self.dropout = Dropout(config.attention_dropout, config.dropout_generator)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 T S"],
        dropout_key: DropoutKey | None = None,
        bias: Float[Array, "#B #N T S"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.attend(x, self.keys_values(memory), mask, dropout_key, bias)

    def keys_values(self, memory: Float[Array, "B S D"]) -> KeysValues:
        """The keys and values of `memory`, which decoding computes once."""
        k = self._split_heads(self.k_proj(memory))
        v = self._split_heads(self.v_proj(memory))
        record(self, "key", k)
        record(self, "value", v)
        return KeysValues(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))

    def attend(
        self,
        x: Float[Array, "B T D"],
        keys_values: KeysValues,
        mask: Bool[Array, "B 1 T S"],
        dropout_key: DropoutKey | None = None,
        bias: Float[Array, "#B #N T S"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attention of x to precomputed keys and values; `bias` is added to the scores before masking."""
        k, v = keys_values
        q = self._split_heads(self.q_proj(x))
        record(self, "query", q)
        heads = ATTENTIONS[self.current_execution.attention](self, q, k, v, mask, dropout_key, bias)
        record(self, "heads", heads)
        output = self.out_proj(heads.reshape(*heads.shape[:2], heads.shape[2] * heads.shape[3]))
        record(self, "output", output)
        return output

    def _exact_heads(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B N H S"],
        v: Float[Array, "B N S U"],
        mask: Bool[Array, "B 1 T S"],
        dropout_key: DropoutKey | None,
        bias: Float[Array, "#B #N T S"] | None,
    ) -> Float[Array, "B T N U"]:
        scores = SCORE_SCALINGS[self.config.score_scaling](q, k)
        if bias is not None:
            scores = scores + bias
        record(self, "scores", scores)
        weights = masked_softmax(scores, mask, self.config.mask_value)
        record(self, "weights", weights)
        weights = self.dropout(weights.astype(v.dtype), dropout_key)
        # Not with BTNU as output: XLA would then multiply v by the weights, for which it has no fast code on a CPU.
        return jnp.einsum("BNTS,BNSU->BNTU", weights, v).transpose(0, 2, 1, 3)

    def _fused_heads(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B N H S"],
        v: Float[Array, "B N S H"],
        mask: Bool[Array, "B 1 T S"],
        dropout_key: DropoutKey | None,  # unused: `ExecutionConfig.check` raises for attention dropout
        bias: Float[Array, "#B #N T S"] | None,
    ) -> Float[Array, "B T N H"]:
        k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)
        return fused_attention(q, k, v, mask, bias, self.config.score_scaling)

    def _split_heads(self, x: Float[Array, "B L NH"]) -> Float[Array, "B L N H"]:
        return x.reshape(*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)


ATTENTIONS: dict[str, Callable[..., Array]] = {
    "exact": MultiHeadAttention._exact_heads,
    "fused": MultiHeadAttention._fused_heads,
}


def scale_product(q: Float[Array, "B T N H"], k: Float[Array, "B N H S"]) -> Float[Array, "B N T S"]:
    """(q · k) / sqrt(H)."""
    return at_least_float32(jnp.einsum("BTNH,BNHS->BNTS", q, k)) / q.shape[-1] ** 0.5


def scale_query(q: Float[Array, "B T N H"], k: Float[Array, "B N H S"]) -> Float[Array, "B N T S"]:
    """(q / sqrt(H)) · k: `scale_product` up to rounding."""
    scaled = (at_least_float32(q) / q.shape[-1] ** 0.5).astype(q.dtype)
    return at_least_float32(jnp.einsum("BTNH,BNHS->BNTS", scaled, k))


def scale_none(q: Float[Array, "B T N H"], k: Float[Array, "B N H S"]) -> Float[Array, "B N T S"]:
    """q · k. Source: T5, whose initial query weights are 1/sqrt(H) of the others instead."""
    return at_least_float32(jnp.einsum("BTNH,BNHS->BNTS", q, k))


SCORE_SCALINGS: dict[str, Callable[..., Array]] = {  # float32 or wider
    "product": scale_product,
    "query": scale_query,
    "none": scale_none,
}


def exact_softmax(scores: Float[Array, "B N T S"], mask: Bool[Array, "B 1 T S"]) -> Float[Array, "B N T S"]:
    """Softmax over the attended keys only: masked weights are 0, and a fully masked row is all zeros."""
    weights = softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.where(mask, weights, 0)


def filled_softmax(
    scores: Float[Array, "B N T S"], mask: Bool[Array, "B 1 T S"], value: float
) -> Float[Array, "B N T S"]:
    """Softmax in which masked keys have the score `value`: a fully masked row attends uniformly to every key."""
    return softmax(jnp.where(mask, scores, value))


def masked_softmax(
    scores: Float[Array, "B N T S"], mask: Bool[Array, "B 1 T S"], mask_value: float | str
) -> Float[Array, "B N T S"]:
    """The softmax selected by a config's `mask_value`; a number is the score of masked keys."""
    if isinstance(mask_value, str):
        return exact_softmax(scores, mask)
    return filled_softmax(scores, mask, mask_value)


def source_mask(src_mask: Bool[Array, "B S"], length: int) -> Bool[Array, "B 1 T S"]:
    """Every query attends to every unmasked source token; `length` is the number of queries, T."""
    return jnp.broadcast_to(src_mask[:, None, None, :], (src_mask.shape[0], 1, length, src_mask.shape[1]))


def source_and_query_mask(src_mask: Bool[Array, "B S"], length: int) -> Bool[Array, "B 1 S S"]:
    """Unmasked source tokens attend to each other; masked ones attend to nothing.

    Raises:
        ValueError: `length`, the number of queries, is not S, so the queries' padding is unknown.
    """
    if length != src_mask.shape[1]:
        raise ValueError(
            f"tgt_tokens: cross_mask='encoder' needs as many target as source tokens, not {length} and "
            f"{src_mask.shape[1]}; pad both sides to one length"
        )
    return src_mask[:, None, None, :] & src_mask[:, None, :, None]


def causal_mask(
    tgt_tokens: Int[Array, "B T"], tgt_mask: Bool[Array, "B T"] | None, pad_id: int, training: bool
) -> Bool[Array, "B 1 T T"]:
    """A target position attends to itself and earlier positions, except those that `tgt_mask` masks.

    Padding is not masked by its id, because that would mask position 0 if decoding starts with the pad id.
    """
    batch, length = tgt_tokens.shape
    mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, 1, length, length))
    return mask if tgt_mask is None else mask & tgt_mask[:, None, None, :]


def causal_and_padding_mask(
    tgt_tokens: Int[Array, "B T"], tgt_mask: Bool[Array, "B T"] | None, pad_id: int, training: bool
) -> Bool[Array, "B 1 T T"]:
    """As `causal_mask`, with tokens of the pad id masked as keys."""
    return causal_mask(tgt_tokens, tgt_mask, pad_id, training) & (tgt_tokens != pad_id)[:, None, None, :]


def causal_padding_and_query_mask(
    tgt_tokens: Int[Array, "B T"], tgt_mask: Bool[Array, "B T"] | None, pad_id: int, training: bool
) -> Bool[Array, "B 1 T T"]:
    """As `causal_and_padding_mask`, with tokens of the pad id masked as queries too."""
    mask = causal_and_padding_mask(tgt_tokens, tgt_mask, pad_id, training)
    return mask & (tgt_tokens != pad_id)[:, None, :, None]


def causal_in_training_mask(
    tgt_tokens: Int[Array, "B T"], tgt_mask: Bool[Array, "B T"] | None, pad_id: int, training: bool
) -> Bool[Array, "B 1 T T"]:
    """Causal in training; in evaluation each position attends to later ones too. Source: d2l_note, as published."""
    if training:
        return causal_mask(tgt_tokens, tgt_mask, pad_id, training)
    batch, length = tgt_tokens.shape
    mask = jnp.broadcast_to(jnp.ones((), bool), (batch, 1, length, length))
    return mask if tgt_mask is None else mask & tgt_mask[:, None, None, :]


ENCODER_MASKS: dict[str, Callable[..., Array]] = {  # (src_mask, S)
    "source": source_mask,
    "source_and_query": source_and_query_mask,
}
CROSS_MASKS: dict[str, Callable[..., Array]] = {  # (src_mask, T)
    "source": source_mask,
    "encoder": source_and_query_mask,
}
DECODER_MASKS: dict[str, Callable[..., Array]] = {  # (tgt_tokens, tgt_mask, pad_id, training)
    "causal": causal_mask,
    "causal_and_padding": causal_and_padding_mask,
    "causal_padding_and_query": causal_padding_and_query_mask,
    "causal_in_training": causal_in_training_mask,
}
