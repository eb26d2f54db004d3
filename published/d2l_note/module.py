"""d2l_note: a reimplementation of a weekly note after Dive into Deep Learning.

As published (with the argument that the note omits), inputs must fill the position table or be one token, which is
broadcast to the whole table, and evaluation is not causal. `as_published=False` repairs this, also in cached decoding.
The note does not specify the arguments of `Transformer`, nor dropout after the positions, which is as in the book.

Letters: B batch, S source length, T target length, L either, P rows of the position table, D d_model, V vocabulary.
Masks here are True = masked.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

FILL = -1e6
# The encoder's output, its mask, and one cache per block: its inputs so far, initially None.
State = tuple[Float[Tensor, "B S D"], Bool[Tensor, "B 1 S"], list[Tensor | None]]


class Attention(nn.Module):
    """W_o(softmax(q kᵀ / sqrt(D / heads)) v)."""

    def __init__(self, d_model: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], mask: Bool[Tensor, "#B #T S"] | None
    ) -> Float[Tensor, "B T D"]:
        q, k, v = (
            projection(side).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, side in ((self.W_q, x), (self.W_k, memory), (self.W_v, memory))
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask[:, None], FILL)
        return self.W_o((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class AddNorm(nn.Module):
    """ln(dropout(y) + x)."""

    def __init__(self, d_model: int, dropout: float):
        super().__init__()
        self.ln, self.dropout = nn.LayerNorm(d_model), nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"], y: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.ln(self.dropout(y) + x)


class FeedForward(nn.Module):
    """Linear, ReLU, Linear."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.s = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.s(x)


def position_table(seq_len: int, d_model: int) -> Float[Tensor, "P D"]:
    """Interleaved sin and cos of position / 10000^(2k/D), computed in float32."""
    angles = torch.arange(seq_len)[:, None] / 10000 ** (torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]


class PositionalEncoding(nn.Module):
    """dropout(x + table); as published the whole table, for any input length. The table is not a buffer."""

    def __init__(self, d_model: int, seq_len: int, dropout: float, as_published: bool):
        super().__init__()
        self.as_published = as_published
        self.dropout = nn.Dropout(dropout)
        self.P = position_table(seq_len, d_model)[None]

    def forward(self, x: Float[Tensor, "B L D"], offset: int) -> Float[Tensor, "B _ D"]:
        table = self.P if self.as_published else self.P[:, offset : offset + x.shape[1]]
        return self.dropout(x + table.to(x))


class EncoderBlock(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, heads: int, dropout: float):
        super().__init__()
        self.attention, self.ffn = Attention(d_model, heads, dropout), FeedForward(d_model, d_ff)
        self.addnorm1, self.addnorm2 = AddNorm(d_model, dropout), AddNorm(d_model, dropout)

    def forward(self, x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S"]) -> Float[Tensor, "B S D"]:
        x = self.addnorm1(x, self.attention(x, x, mask))
        return self.addnorm2(x, self.ffn(x))


class DecoderBlock(nn.Module):
    """Self-attention over cached and new inputs, cross-attention, then the feed-forward network."""

    def __init__(self, index: int, d_model: int, d_ff: int, heads: int, dropout: float, as_published: bool):
        super().__init__()
        self.index, self.as_published = index, as_published
        self.attention1, self.attention2 = (Attention(d_model, heads, dropout) for _ in range(2))
        self.addnorm1, self.addnorm2, self.addnorm3 = (AddNorm(d_model, dropout) for _ in range(3))
        self.ffn = FeedForward(d_model, d_ff)

    def forward(self, x: Float[Tensor, "B T D"], state: State) -> Float[Tensor, "B T D"]:
        memory, memory_mask, cache = state
        past = cache[self.index]
        inputs = x if past is None else torch.cat([past, x], dim=1)
        cache[self.index] = inputs
        mask = None
        if self.training or not self.as_published:
            new, total = x.shape[1], inputs.shape[1]
            mask = torch.ones(new, total, dtype=torch.bool, device=x.device).triu(1 + total - new)[None]
        x = self.addnorm1(x, self.attention1(x, inputs, mask))
        x = self.addnorm2(x, self.attention2(x, memory, memory_mask))
        return self.addnorm3(x, self.ffn(x))


class Encoder(nn.Module):
    """Embedding times sqrt(D), positions, blocks."""

    def __init__(self, vocab_size: int, d_model: int, positions: PositionalEncoding, blocks: list[EncoderBlock]):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), positions
        self.blocks = nn.ModuleDict({f"block_{i}": block for i, block in enumerate(blocks)})

    def forward(self, src: Int[Tensor, "B S"], mask: Bool[Tensor, "B 1 S"]) -> Float[Tensor, "B S D"]:
        x = self.positions(self.embedding(src) * math.sqrt(self.embedding.embedding_dim), 0)
        for block in self.blocks.values():
            x = block(x, mask)
        return x


class Decoder(nn.Module):
    """Embedding times sqrt(D), positions, blocks, and the head."""

    def __init__(self, vocab_size: int, d_model: int, positions: PositionalEncoding, blocks: list[DecoderBlock]):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), positions
        self.blocks = nn.ModuleDict({f"block_{i}": block for i, block in enumerate(blocks)})
        self.f = nn.Linear(d_model, vocab_size)

    def init_state(self, memory: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S"]) -> State:
        """The state before the first token."""
        return memory, mask, [None] * len(self.blocks)

    def forward(self, tgt: Int[Tensor, "B T"], state: State) -> tuple[Float[Tensor, "B _ V"], State]:
        first = state[2][0]
        offset = 0 if first is None else first.shape[1]
        x = self.positions(self.embedding(tgt) * math.sqrt(self.embedding.embedding_dim), offset)
        for block in self.blocks.values():
            x = block(x, state)
        return self.f(x), state


class Transformer(nn.Module):
    """Logits (B, T, V) of source and target ids, and the decoder's state; `mask` is True for source padding."""

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int,
        d_ff: int,
        heads: int,
        layers: int,
        seq_len: int,
        dropout: float,
        *,
        as_published: bool,
    ):
        super().__init__()
        encoder, decoder = (PositionalEncoding(d_model, seq_len, dropout, as_published) for _ in range(2))
        sizes = (d_model, d_ff, heads, dropout)
        self.encoder = Encoder(src_vocab_size, d_model, encoder, [EncoderBlock(*sizes) for _ in range(layers)])
        blocks = [DecoderBlock(i, *sizes, as_published) for i in range(layers)]
        self.decoder = Decoder(tgt_vocab_size, d_model, decoder, blocks)

    def forward(
        self, src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"], mask: Bool[Tensor, "B 1 S"]
    ) -> tuple[Float[Tensor, "B _ V"], State]:
        return self.decoder(tgt, self.decoder.init_state(self.encoder(src, mask), mask))


@torch.no_grad()
def predict(
    model: Transformer, src: Int[Tensor, "1 S"], mask: Bool[Tensor, "1 1 S"], bos: int, eos: int, num_steps: int
) -> list[int]:
    """Greedy decoding with the cache of layer inputs; the result has neither start token nor EOS.

    The loop is from the book, because the note omits it.

    Raises:
        RuntimeError: as published, because one token is broadcast to the whole position table.
    """
    state = model.decoder.init_state(model.encoder(src, mask), mask)
    tokens, token = [], torch.tensor([[bos]])
    for _ in range(num_steps):
        logits, state = model.decoder(token, state)
        token = logits.argmax(-1)
        if token.squeeze(0).item() == eos:
            break
        tokens.append(int(token))
    return tokens
