"""annotated_transformer: a reimplementation of the model of harvardnlp's Annotated Transformer.

As published, dropout of attention weights is always 0.1; with `as_published=False` it follows the setting. The other
mistakes are in its training.

Letters: B batch, S source length, T target length, L either, D d_model, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

FILL = -1e9


class LayerNorm(nn.Module):
    """a_2 · (x - mean) / (sample standard deviation + eps) + b_2."""

    def __init__(self, d_model: int, eps: float = 1e-6):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    """x + dropout(f(norm(x)))."""

    def __init__(self, d_model: int, dropout: float):
        super().__init__()
        self.norm, self.dropout = LayerNorm(d_model), nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"], sublayer: Callable[[Tensor], Tensor]) -> Float[Tensor, "B L D"]:
        return x + self.dropout(sublayer(self.norm(x)))


class MultiHeadedAttention(nn.Module):
    """softmax(q kᵀ / sqrt(d_k)) v; `linears` 0 to 3 are the projections of q, k, v and the output."""

    def __init__(self, h: int, d_model: int, dropout: float):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], mask: Bool[Tensor, "B #T S"]
    ) -> Float[Tensor, "B T D"]:
        sides = zip(self.linears, (x, memory, memory), strict=False)
        q, k, v = (linear(side).unflatten(-1, (self.h, -1)).transpose(1, 2) for linear, side in sides)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = self.dropout(scores.masked_fill(~mask[:, None], FILL).softmax(-1))
        return self.linears[3]((weights @ v).transpose(1, 2).flatten(2))


class PositionwiseFeedForward(nn.Module):
    """w_2(dropout(relu(w_1(x))))."""

    def __init__(self, d_model: int, d_ff: int, dropout: float):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.w_2(self.dropout(self.w_1(x).relu()))


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, h: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model, attention_dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.sublayer = nn.ModuleList(SublayerConnection(d_model, dropout) for _ in range(2))

    def forward(self, x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S"]) -> Float[Tensor, "B S D"]:
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, h: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model, attention_dropout)
        self.src_attn = MultiHeadedAttention(h, d_model, attention_dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.sublayer = nn.ModuleList(SublayerConnection(d_model, dropout) for _ in range(3))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "B 1 S"],
        tgt_mask: Bool[Tensor, "B T T"],
    ) -> Float[Tensor, "B T D"]:
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, tgt_mask))
        x = self.sublayer[1](x, lambda y: self.src_attn(y, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Stack(nn.Module):
    """A stack of layers and a final norm."""

    def __init__(self, layers: Iterable[nn.Module], d_model: int):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), LayerNorm(d_model)

    def forward(self, x: Float[Tensor, "B L D"], *others: Tensor) -> Float[Tensor, "B L D"]:
        for layer in self.layers:
            x = layer(x, *others)
        return self.norm(x)


class Embeddings(nn.Module):
    """lut(token) · sqrt(D)."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.lut = nn.Embedding(vocab_size, d_model)

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return self.lut(tokens) * math.sqrt(self.lut.embedding_dim)


class PositionalEncoding(nn.Module):
    """dropout(x + sin and cos of position · exp(-2k/D · log 10000)), with the table computed in float32."""

    def __init__(self, d_model: int, dropout: float, rows: int = 5000):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        frequencies = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        angles = torch.arange(0, rows)[:, None] * frequencies
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None, :, :d_model])

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.dropout(x + self.get_buffer("pe")[:, : x.shape[1]])


class Generator(nn.Module):
    """log_softmax(proj(x))."""

    def __init__(self, d_model: int, vocab_size: int):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab_size)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return self.proj(x).log_softmax(-1)


class Transformer(nn.Module):
    """The decoder's output (B, T, D) for ids and their masks; `generator` maps it to log-probabilities."""

    def __init__(
        self,
        src_vocab: int,
        tgt_vocab: int,
        layers: int = 6,
        d_model: int = 512,
        d_ff: int = 2048,
        h: int = 8,
        dropout: float = 0.1,
        *,
        as_published: bool,
    ):
        super().__init__()
        sizes = (d_model, d_ff, h, dropout, 0.1 if as_published else dropout)
        self.encoder = Stack((EncoderLayer(*sizes) for _ in range(layers)), d_model)
        self.decoder = Stack((DecoderLayer(*sizes) for _ in range(layers)), d_model)
        self.src_embed = nn.Sequential(Embeddings(src_vocab, d_model), PositionalEncoding(d_model, dropout))
        self.tgt_embed = nn.Sequential(Embeddings(tgt_vocab, d_model), PositionalEncoding(d_model, dropout))
        self.generator = Generator(d_model, tgt_vocab)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Int[Tensor, "B S"],
        tgt: Int[Tensor, "B T"],
        src_mask: Bool[Tensor, "B 1 S"],
        tgt_mask: Bool[Tensor, "B T T"],
    ) -> Float[Tensor, "B T D"]:
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src: Int[Tensor, "B S"], src_mask: Bool[Tensor, "B 1 S"]) -> Float[Tensor, "B S D"]:
        """The encoder's output."""
        return self.encoder(self.src_embed(src), src_mask)

    def decode(
        self,
        memory: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "B 1 S"],
        tgt: Int[Tensor, "B T"],
        tgt_mask: Bool[Tensor, "B T T"],
    ) -> Float[Tensor, "B T D"]:
        """The decoder's output."""
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)


def make_masks(
    src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"], pad: int
) -> tuple[Bool[Tensor, "B 1 S"], Bool[Tensor, "B T T"]]:
    """Masks of source and target, True = keep."""
    causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).tril()
    return (src != pad)[:, None, :], (tgt != pad)[:, None, :] & causal


@torch.no_grad()
def greedy_decode(
    model: Transformer, src: Int[Tensor, "B S"], src_mask: Bool[Tensor, "B 1 S"], max_len: int, start: int
) -> Int[Tensor, "B max_len"]:
    """Greedy decoding; does not stop at EOS."""
    memory, tgt = model.encode(src, src_mask), torch.full((len(src), 1), start)
    for length in range(1, max_len):
        causal = torch.ones(1, length, length, dtype=torch.bool).tril()
        log_probs = model.generator(model.decode(memory, src_mask, tgt, causal)[:, -1])
        tgt = torch.cat([tgt, log_probs.argmax(-1)[:, None]], dim=1)
    return tgt
