"""lucky_glass: a reimplementation of a blog post of 2023, trained on Multi30k, German to English.

As published, the decoder never sees the source, and norms mix positions; `as_published=False` repairs both. The post
does not specify the arguments of `Transformer`, nor how masks are made; here they are made from the padding.

Letters: B batch, S source length, T target length, L either, D d_model, H width of a head, V vocabulary.
"""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

PAD = 1
POSITIONS = 1000


def published_position_table(rows: int, d_model: int) -> Float[Tensor, "P D"]:
    """sin(position · 10000^(+2k/D)) in both columns of a pair: the exponent's sign and the odd columns are wrong."""
    frequencies = 10000.0 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.sin(torch.arange(rows)[:, None] * frequencies).repeat_interleave(2, dim=1)[:, :d_model].float()


def position_table(rows: int, d_model: int) -> Float[Tensor, "P D"]:
    """Interleaved sin and cos of position · 10000^(-2k/D). Source: Vaswani et al. 2017, section 3.5."""
    frequencies = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model].float()


class TokenEmbedding(nn.Module):
    """embedding(token) · sqrt(D)."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class PositionEmbedding(nn.Module):
    """dropout(table + x); the table is an untrained parameter."""

    def __init__(self, table: Float[Tensor, "P D"], dropout: float):
        super().__init__()
        self.additive = nn.Parameter(table, requires_grad=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.dropout(self.additive[: x.shape[1]] + x)


class Attention(nn.Module):
    """softmax(q kᵀ / sqrt(H)) v of one head; matrices are (in, out) and have no bias."""

    def __init__(self, d_model: int, width: int, as_published: bool):
        super().__init__()
        self.as_published = as_published
        self.wk, self.wq, self.wv = (nn.Parameter(torch.zeros(d_model, width)) for _ in range(3))
        self.weights = nn.Identity()  # a hook point for comparisons

    def forward(
        self, query: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], keep: Bool[Tensor, "B T S"]
    ) -> Float[Tensor, "B T H"]:
        q, k, v = query @ self.wq, memory @ self.wk, memory @ self.wv
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
        if not self.as_published:  # a fully masked row is NaN
            weights = weights.masked_fill(~keep, 0)
        return self.weights(weights) @ v


class MultiHeadAttention(nn.Module):
    """norm(query + dropout(concat(heads) Wo)); in cross-attention as published: norm(query)."""

    def __init__(self, d_model: int, heads: int, dropout: float, cross: bool, as_published: bool):
        super().__init__()
        self.attentions = nn.ModuleList(Attention(d_model, d_model // heads, as_published) for _ in range(heads))
        self.wo = nn.Parameter(torch.zeros(d_model, d_model))
        self.dropout = nn.Dropout(dropout)
        self.discarded = cross and as_published
        self.as_published = as_published

    def forward(
        self, query: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], keep: Bool[Tensor, "B T S"]
    ) -> Float[Tensor, "B T D"]:
        heads = torch.cat([attention(query, memory, keep) for attention in self.attentions], dim=-1)
        output = self.dropout(heads @ self.wo)
        return norm(query if self.discarded else query + output, self.as_published)


class FeedForward(nn.Module):
    """norm(x + dropout(linear2(relu(linear1(x)))))."""

    def __init__(self, d_model: int, d_ff: int, dropout: float, as_published: bool):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)
        self.as_published = as_published

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return norm(x + self.dropout(self.linear2(self.linear1(x).relu())), self.as_published)


def norm(x: Float[Tensor, "B L D"], as_published: bool) -> Float[Tensor, "B L D"]:
    """LayerNorm without gain and bias; as published over all positions and features of a sentence."""
    return functional.layer_norm(x, x.shape[1:] if as_published else x.shape[2:], eps=1e-5)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, heads: int, dropout: float, as_published: bool):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, heads, dropout, cross=False, as_published=as_published)
        self.feed_forward = FeedForward(d_model, d_ff, dropout, as_published)

    def forward(self, x: Float[Tensor, "B S D"], keep: Bool[Tensor, "B S S"]) -> Float[Tensor, "B S D"]:
        return self.feed_forward(self.attention(x, x, keep))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, heads: int, dropout: float, as_published: bool):
        super().__init__()
        self.masked_attention = MultiHeadAttention(d_model, heads, dropout, cross=False, as_published=as_published)
        self.attention = MultiHeadAttention(d_model, heads, dropout, cross=True, as_published=as_published)
        self.feed_forward = FeedForward(d_model, d_ff, dropout, as_published)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        keep: Bool[Tensor, "B T T"],
        cross_keep: Bool[Tensor, "B T S"],
    ) -> Float[Tensor, "B T D"]:
        x = self.masked_attention(x, x, keep)
        return self.feed_forward(self.attention(x, memory, cross_keep))


class Stack(nn.Module):
    """A stack of layers."""

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Float[Tensor, "B L D"], *others: Tensor) -> Float[Tensor, "B L D"]:
        for layer in self.layers:
            x = layer(x, *others)
        return x


class Transformer(nn.Module):
    """Logits (B, T, V) of source and target ids, whose padding is 1."""

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int = 512,
        d_ff: int = 512,
        heads: int = 8,
        layers: int = 3,
        dropout: float = 0.1,
        *,
        as_published: bool,
    ):
        super().__init__()
        self.src_tok_embed = TokenEmbedding(src_vocab_size, d_model)
        self.tgt_tok_embed = TokenEmbedding(tgt_vocab_size, d_model)
        table = published_position_table if as_published else position_table
        self.pos_embed = PositionEmbedding(table(POSITIONS, d_model), dropout)
        sizes = (d_model, d_ff, heads, dropout, as_published)
        self.encoder = Stack(EncoderLayer(*sizes) for _ in range(layers))
        self.decoder = Stack(DecoderLayer(*sizes) for _ in range(layers))
        self.linear = nn.Linear(d_model, tgt_vocab_size)
        for name, parameter in self.named_parameters():
            # As published, this overwrites the position table with noise too.
            if parameter.dim() > 1 and (as_published or name != "pos_embed.additive"):
                nn.init.xavier_uniform_(parameter)

    def forward(self, src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        src_keep = (src != PAD)[:, None, :]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).tril()
        memory = self.encoder(self.pos_embed(self.src_tok_embed(src)), src_keep.expand(-1, src.shape[1], -1))
        x = self.pos_embed(self.tgt_tok_embed(tgt))
        x = self.decoder(x, memory, causal & (tgt != PAD)[:, None, :], src_keep.expand(-1, tgt.shape[1], -1))
        return self.linear(x)
