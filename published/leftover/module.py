"""leftover: a reimplementation of a hand-written Transformer of 2025, for opus_books, English to Italian.

As published, masks have no effect, the head ends with a softmax, and cross-attention gets the encoder's square mask.
`as_published=False` repairs these, does not mask query rows, and has no unused layer. The write-up does not specify the
outer class, nor the shape of the unused layer.

A mask with S rows broadcasts one target token to S, which is why some lengths are `_`.

Letters: B batch, S source length, T target length, L either, N heads, D d_model, V vocabulary.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

PUBLISHED_FILL = -1e-9


class InputEmbedding(nn.Module):
    """embedding(token) · sqrt(D); the row of padding is zero."""

    def __init__(self, vocab_size: int, d_model: int, pad: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=pad)

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class PositionEmbedding(nn.Module):
    """dropout(x + sin and cos of position · 10000^(-2k/D)), with the table computed in float32."""

    def __init__(self, d_model: int, seq_len: int, dropout: float):
        super().__init__()
        frequencies = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        angles = torch.arange(seq_len).float()[:, None] * frequencies
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None, :, :d_model])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.dropout(x + self.get_buffer("pe")[:, : x.shape[1]])


class LayerNorm(nn.Module):
    """gamma · (x - mean) / sqrt(variance + eps) + beta."""

    def __init__(self, d_model: int, eps: float = 1e-12):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        variance = x.var(-1, unbiased=False, keepdim=True)
        return self.gamma * (x - x.mean(-1, keepdim=True)) / (variance + self.eps).sqrt() + self.beta


class MultiHeadAttention(nn.Module):
    """w_o(softmax(q kᵀ / sqrt(d_k)) v)."""

    def __init__(self, d_model: int, heads: int, dropout: float, as_published: bool):
        super().__init__()
        self.heads, self.as_published = heads, as_published
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 _ _"]
    ) -> Float[Tensor, "B _ D"]:
        q, k, v = (
            projection(side).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, side in ((self.w_q, x), (self.w_k, memory), (self.w_v, memory))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        fill = PUBLISHED_FILL if self.as_published else torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~mask, fill).softmax(-1)
        if not self.as_published:  # a fully masked row attends to nothing
            weights = weights.masked_fill(~mask, 0)
        return self.w_o((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """fc2(dropout(relu(fc1(x))))."""

    def __init__(self, d_model: int, d_ff: int, dropout: float):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.fc2(self.dropout(self.fc1(x).relu()))


class EncoderBlock(nn.Module):
    """norm(x + dropout(f(x))) for self-attention and the feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, heads: int, dropout: float, as_published: bool):
        super().__init__()
        self.multi_head_attention = MultiHeadAttention(d_model, heads, dropout, as_published)
        self.ffn = FeedForward(d_model, d_ff, dropout)
        self.layer_norm1, self.layer_norm2 = LayerNorm(d_model), LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 #S S"]) -> Float[Tensor, "B S D"]:
        x = self.layer_norm1(x + self.dropout(self.multi_head_attention(x, x, mask)))
        return self.layer_norm2(x + self.dropout(self.ffn(x)))


class DecoderBlock(nn.Module):
    """As `EncoderBlock`, with cross-attention in between."""

    def __init__(self, d_model: int, d_ff: int, heads: int, dropout: float, as_published: bool):
        super().__init__()
        self.multi_head_attention1 = MultiHeadAttention(d_model, heads, dropout, as_published)
        self.cross_attention = MultiHeadAttention(d_model, heads, dropout, as_published)
        self.ffn = FeedForward(d_model, d_ff, dropout)
        self.layer_norm1, self.layer_norm2, self.layer_norm3 = (LayerNorm(d_model) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Bool[Tensor, "B 1 _ S"],
        mask: Bool[Tensor, "B 1 _ _"],
    ) -> Float[Tensor, "B _ D"]:
        x = self.layer_norm1(x + self.dropout(self.multi_head_attention1(x, x, mask)))
        x = self.layer_norm2(x + self.dropout(self.cross_attention(x, memory, memory_mask)))
        return self.layer_norm3(x + self.dropout(self.ffn(x)))


class Encoder(nn.Module):
    """Embedding, positions, blocks."""

    def __init__(self, embedding: InputEmbedding, positions: PositionEmbedding, blocks: list[EncoderBlock]):
        super().__init__()
        self.input_embedding, self.pos_embedding = embedding, positions
        self.encoder_blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B 1 #S S"]) -> Float[Tensor, "B S D"]:
        x = self.pos_embedding(self.input_embedding(tokens))
        for block in self.encoder_blocks:
            x = block(x, mask)
        return x


class Decoder(nn.Module):
    """Embedding, positions, blocks; as published with an unused layer."""

    def __init__(
        self,
        embedding: InputEmbedding,
        positions: PositionEmbedding,
        blocks: list[DecoderBlock],
        proj: nn.Linear | None,
    ):
        super().__init__()
        self.input_embedding, self.pos_embedding = embedding, positions
        self.decoder_layers = nn.ModuleList(blocks)
        self.proj = proj

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Bool[Tensor, "B 1 _ S"],
        mask: Bool[Tensor, "B 1 _ _"],
    ) -> Float[Tensor, "B _ D"]:
        x = self.pos_embedding(self.input_embedding(tokens))
        for block in self.decoder_layers:
            x = block(x, memory, memory_mask, mask)
        return x


class Projection(nn.Module):
    """proj(x); as published softmax(proj(x))."""

    def __init__(self, d_model: int, vocab_size: int, as_published: bool):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab_size)
        self.as_published = as_published

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return self.proj(x).softmax(-1) if self.as_published else self.proj(x)


class Transformer(nn.Module):
    """Logits (B, T, V), as published probabilities, for ids and their masks."""

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int = 512,
        d_ff: int = 2048,
        heads: int = 8,
        layers: int = 8,
        seq_len: int = 350,
        dropout: float = 0.1,
        pad: int = 1,
        *,
        as_published: bool,
    ):
        super().__init__()
        sizes = (d_model, d_ff, heads, dropout, as_published)
        self.encoder = Encoder(
            InputEmbedding(src_vocab_size, d_model, pad),
            PositionEmbedding(d_model, seq_len, dropout),
            [EncoderBlock(*sizes) for _ in range(layers)],
        )
        self.decoder = Decoder(
            InputEmbedding(tgt_vocab_size, d_model, pad),
            PositionEmbedding(d_model, seq_len, dropout),
            [DecoderBlock(*sizes) for _ in range(layers)],
            nn.Linear(d_model, tgt_vocab_size) if as_published else None,
        )
        self.projection = Projection(d_model, tgt_vocab_size, as_published)

    def forward(
        self,
        src: Int[Tensor, "B S"],
        tgt: Int[Tensor, "B T"],
        src_mask: Bool[Tensor, "B 1 #S S"],
        tgt_mask: Bool[Tensor, "B 1 T T"],
    ) -> Float[Tensor, "B T V"]:
        return self.projection(self.decoder(tgt, self.encoder(src, src_mask), src_mask, tgt_mask))


def make_masks(
    src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"], pad: int, as_published: bool
) -> tuple[Bool[Tensor, "B 1 #S S"], Bool[Tensor, "B 1 T T"]]:
    """Masks of source and target, True = keep; as published the query rows of padding are masked too."""
    causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).tril()
    src_keep, tgt_keep = src != pad, tgt != pad
    src_mask, tgt_mask = src_keep[:, None, None, :], tgt_keep[:, None, None, :] & causal
    if as_published:
        return src_mask & src_keep[:, None, :, None], tgt_mask & tgt_keep[:, None, :, None]
    return src_mask, tgt_mask


@torch.no_grad()
def greedy_decode(model: Transformer, src: Int[Tensor, "1 S"], pad: int, sos: int, eos: int, max_len: int) -> list[int]:
    """Greedy decoding up to EOS or `max_len` tokens, with the start token.

    As published, cross-attention gets the encoder's square mask, which broadcasts to one target token, but not to two.

    Raises:
        RuntimeError: as published, at the second step, unless the source has two tokens.
    """
    src_mask, _ = make_masks(src, src, pad, model.projection.as_published)
    memory, tgt = model.encoder(src, src_mask), torch.tensor([[sos]])
    while tgt.shape[1] < max_len:
        causal = torch.ones(1, 1, tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        token = model.projection(model.decoder(tgt, memory, src_mask, causal)[:, -1]).argmax(-1)
        tgt = torch.cat([tgt, token[:, None]], dim=1)
        if token.item() == eos:
            break
    return tgt[0].tolist()
