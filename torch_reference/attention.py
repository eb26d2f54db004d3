"""Multi-head attention and its masks.

Letters: B batch, T query length, S key length, D d_model, N heads, H width of a query/key head, U of a value head.
Masks are boolean, True = attend.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from ..configs.schema import TransformerConfig
from .dropout import Dropout, DropoutKey
from .layers import Linear
from .module import at_least_float32, record


class MultiHeadAttention(nn.Module):
    """concat_n(softmax(q_n · k_n / sqrt(H) + bias_n) v_n) Wo, with q = x Wq, k = memory Wk, v = memory Wv.

    Source: Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, generator: Generator | None = None):
        super().__init__()
        self.config, self.num_heads = config, num_heads
        query_key = num_heads * config.query_key_width(num_heads)
        value = num_heads * config.value_width(num_heads)
        self.q_proj = Linear(config, config.d_model, query_key, config.q_proj_bias, generator, num_heads, "query")
        self.k_proj = Linear(config, config.d_model, query_key, config.k_proj_bias, generator, num_heads)
        self.v_proj = Linear(config, config.d_model, value, config.v_proj_bias, generator, num_heads)
        self.out_proj = Linear(config, value, config.d_model, config.out_proj_bias, generator)
        self.dropout = Dropout(config.attention_dropout, config.dropout_generator)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B 1 T S"],
        dropout_key: DropoutKey | None = None,
        bias: Float[Tensor, "#B #N T S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        q = self._split_heads(self.q_proj(x))
        k = self._split_heads(self.k_proj(memory))
        v = self._split_heads(self.v_proj(memory))
        for name, heads in (("query", q), ("key", k), ("value", v)):
            record(self, name, heads)
        scores = SCORE_SCALINGS[self.config.score_scaling](q, k)
        if bias is not None:
            scores = scores + bias
        record(self, "scores", scores)
        weights = masked_softmax(scores, mask, self.config.mask_value)
        record(self, "weights", weights)
        weights = self.dropout(weights.to(v.dtype), dropout_key)
        heads = torch.einsum("BNTS,BSNU->BTNU", weights, v)
        record(self, "heads", heads)
        output = self.out_proj(heads.flatten(2))
        record(self, "output", output)
        return output

    def _split_heads(self, x: Float[Tensor, "B L NH"]) -> Float[Tensor, "B L N H"]:
        return x.unflatten(-1, (self.num_heads, x.shape[2] // self.num_heads))


def scale_product(q: Float[Tensor, "B T N H"], k: Float[Tensor, "B S N H"]) -> Float[Tensor, "B N T S"]:
    """(q · k) / sqrt(H)."""
    return at_least_float32(torch.einsum("BTNH,BSNH->BNTS", q, k)) / q.shape[-1] ** 0.5


def scale_query(q: Float[Tensor, "B T N H"], k: Float[Tensor, "B S N H"]) -> Float[Tensor, "B N T S"]:
    """(q / sqrt(H)) · k: `scale_product` up to rounding."""
    scaled = (at_least_float32(q) / q.shape[-1] ** 0.5).to(q.dtype)
    return at_least_float32(torch.einsum("BTNH,BSNH->BNTS", scaled, k))


def scale_none(q: Float[Tensor, "B T N H"], k: Float[Tensor, "B S N H"]) -> Float[Tensor, "B N T S"]:
    """q · k. Source: T5, whose initial query weights are 1/sqrt(H) of the others instead."""
    return at_least_float32(torch.einsum("BTNH,BSNH->BNTS", q, k))


SCORE_SCALINGS: dict[str, Callable[..., Tensor]] = {  # float32 or wider
    "product": scale_product,
    "query": scale_query,
    "none": scale_none,
}


def exact_softmax(scores: Float[Tensor, "B N T S"], mask: Bool[Tensor, "B 1 T S"]) -> Float[Tensor, "B N T S"]:
    """Softmax over the attended keys only: masked weights are 0, and a fully masked row is all zeros."""
    weights = torch.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), dim=-1)
    return torch.where(mask, weights, 0)


def filled_softmax(
    scores: Float[Tensor, "B N T S"], mask: Bool[Tensor, "B 1 T S"], value: float
) -> Float[Tensor, "B N T S"]:
    """Softmax in which masked keys have the score `value`: a fully masked row attends uniformly to every key."""
    return torch.softmax(torch.where(mask, scores, value), dim=-1)


def masked_softmax(
    scores: Float[Tensor, "B N T S"], mask: Bool[Tensor, "B 1 T S"], mask_value: float | str
) -> Float[Tensor, "B N T S"]:
    """The softmax selected by a config's `mask_value`; a number is the score of masked keys."""
    if isinstance(mask_value, str):
        return exact_softmax(scores, mask)
    return filled_softmax(scores, mask, mask_value)


def source_mask(src_mask: Bool[Tensor, "B S"], length: int) -> Bool[Tensor, "B 1 T S"]:
    """Every query attends to every unmasked source token; `length` is the number of queries, T."""
    return src_mask[:, None, None, :].expand(-1, 1, length, -1)


def source_and_query_mask(src_mask: Bool[Tensor, "B S"], length: int) -> Bool[Tensor, "B 1 S S"]:
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
    tgt_tokens: Int[Tensor, "B T"], tgt_mask: Bool[Tensor, "B T"] | None, pad_id: int, training: bool
) -> Bool[Tensor, "B 1 T T"]:
    """A target position attends to itself and earlier positions, except those that `tgt_mask` masks.

    Padding is not masked by its id, because that would mask position 0 if decoding starts with the pad id.
    """
    batch, length = tgt_tokens.shape
    mask = torch.ones(length, length, dtype=torch.bool, device=tgt_tokens.device).tril().expand(batch, 1, -1, -1)
    return mask if tgt_mask is None else mask & tgt_mask[:, None, None, :]


def causal_and_padding_mask(
    tgt_tokens: Int[Tensor, "B T"], tgt_mask: Bool[Tensor, "B T"] | None, pad_id: int, training: bool
) -> Bool[Tensor, "B 1 T T"]:
    """As `causal_mask`, with tokens of the pad id masked as keys."""
    return causal_mask(tgt_tokens, tgt_mask, pad_id, training) & (tgt_tokens != pad_id)[:, None, None, :]


def causal_padding_and_query_mask(
    tgt_tokens: Int[Tensor, "B T"], tgt_mask: Bool[Tensor, "B T"] | None, pad_id: int, training: bool
) -> Bool[Tensor, "B 1 T T"]:
    """As `causal_and_padding_mask`, with tokens of the pad id masked as queries too."""
    mask = causal_and_padding_mask(tgt_tokens, tgt_mask, pad_id, training)
    return mask & (tgt_tokens != pad_id)[:, None, :, None]


def causal_in_training_mask(
    tgt_tokens: Int[Tensor, "B T"], tgt_mask: Bool[Tensor, "B T"] | None, pad_id: int, training: bool
) -> Bool[Tensor, "B 1 T T"]:
    """Causal in training; in evaluation each position attends to later ones too. Source: d2l_note, as published."""
    if training:
        return causal_mask(tgt_tokens, tgt_mask, pad_id, training)
    batch, length = tgt_tokens.shape
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=tgt_tokens.device)
    return mask if tgt_mask is None else mask & tgt_mask[:, None, None, :]


ENCODER_MASKS: dict[str, Callable[..., Tensor]] = {  # (src_mask, S)
    "source": source_mask,
    "source_and_query": source_and_query_mask,
}
CROSS_MASKS: dict[str, Callable[..., Tensor]] = {  # (src_mask, T)
    "source": source_mask,
    "encoder": source_and_query_mask,
}
DECODER_MASKS: dict[str, Callable[..., Tensor]] = {  # (tgt_tokens, tgt_mask, pad_id, training)
    "causal": causal_mask,
    "causal_and_padding": causal_and_padding_mask,
    "causal_padding_and_query": causal_padding_and_query_mask,
    "causal_in_training": causal_in_training_mask,
}
