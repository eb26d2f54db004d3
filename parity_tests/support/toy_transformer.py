"""A small correct Transformer that shares no code with the twins, for tests that plant known mistakes.

Letters: B batch, S source length, T target length, L either, D width, V vocabulary. Masks are True = attend.
"""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention: softmax(q kᵀ / sqrt(width)) v per head."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.fill = heads, -1e30
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Outputs (B, L, D), with queries from `x`, keys and values from `memory`."""
        q, k, v = (
            layer(side).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, side in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, self.fill)
        return self.out((self.normalize(scores) @ v).transpose(1, 2).flatten(2))

    def normalize(self, scores: Tensor) -> Tensor:
        """Attention weights of scores (B, heads, L, L)."""
        return scores.softmax(-1)


class Layer(nn.Module):
    """A pre-norm layer: self-attention, in the decoder cross-attention, then feed-forward."""

    def __init__(self, width: int, heads: int, dropout: float, decodes: bool):
        super().__init__()
        self.self_attention = Attention(width, heads)
        self.cross_attention = Attention(width, heads) if decodes else None
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3 if decodes else 2)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, cross: Tensor | None = None) -> Tensor:
        """(B, L, D)."""
        y = self.norms[0](x)
        x = x + self.dropout(self.self_attention(y, y, mask))
        if self.cross_attention is not None and memory is not None and cross is not None:
            x = x + self.dropout(self.cross_attention(self.norms[1](x), memory, cross))
        return x + self.dropout(self.feed_forward(self.norms[-1](x)))


class ToyTransformer(nn.Module):
    """The model, from ids (B, S) and (B, T) to logits (B, T, V)."""

    VOCABULARY, PAD, DROPOUT, LONGEST = 23, 0, 0.1, 16

    def __init__(self, width: int = 12, heads: int = 3, layers: int = 2):
        super().__init__()
        self.src_embedding, self.tgt_embedding = (nn.Embedding(self.VOCABULARY, width) for _ in range(2))
        self.positions = nn.Embedding(self.LONGEST, width)
        self.encoder, self.decoder = (
            nn.ModuleList([Layer(width, heads, self.DROPOUT, decodes) for _ in range(layers)])
            for decodes in (False, True)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.VOCABULARY)

    def source_mask(self, src: Tensor) -> Tensor:
        """(B, 1, 1, S) for the encoder."""
        return (src != self.PAD)[:, None, None]

    def cross_mask(self, src: Tensor) -> Tensor:
        """(B, 1, 1, S) for cross-attention."""
        return (src != self.PAD)[:, None, None]

    def target_mask(self, tgt: Tensor) -> Tensor:
        """(1, 1, T, T)."""
        return torch.ones(tgt.shape[1], tgt.shape[1]).tril().bool()[None, None]

    def places(self, tokens: Tensor) -> Tensor:
        """(L,) rows of the position table."""
        return torch.arange(tokens.shape[1])

    def encode(self, src: Tensor) -> Tensor:
        """(B, S, D)."""
        x = self.src_embedding(src) + self.positions(self.places(src))
        for layer in self.encoder:
            x = layer(x, self.source_mask(src))
        return x

    def decode(self, tgt: Tensor, memory: Tensor, cross: Tensor) -> Tensor:
        """(B, T, V)."""
        x = self.tgt_embedding(tgt) + self.positions(self.places(tgt))
        for layer in self.decoder:
            x = layer(x, self.target_mask(tgt), memory, cross)
        return self.head(self.norm(x))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """(B, T, V)."""
        return self.decode(tgt, self.encode(src), self.cross_mask(src))


def step_by_step(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """Logits (B, T, V) of a `ToyTransformer`, computed one position at a time."""
    assert isinstance(module, ToyTransformer)
    memory, cross = module.encode(src), module.cross_mask(src)
    return torch.cat([module.decode(tgt[:, : t + 1], memory, cross)[:, -1:] for t in range(tgt.shape[1])], 1)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats per token, without padding."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ToyTransformer.PAD)
