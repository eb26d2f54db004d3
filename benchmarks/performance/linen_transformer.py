"""A Transformer in Flax Linen as people write it today, with `nn.MultiHeadDotProductAttention`, for the benchmark.

The function is that of `torch.nn.Transformer`. Style: the WMT example of Flax.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-5  # of `torch.nn.LayerNorm`


class Sublayers(nn.Module):
    """What encoder and decoder layers have in common: attention or feed-forward network, then sum and norm."""

    num_heads: int
    d_ff: int
    dropout: float

    def attend(self, x: jax.Array, memory: jax.Array, mask: jax.Array | None, name: str) -> jax.Array:
        """Norm(x + Dropout(Attention(x, memory)))."""
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads,
            dropout_rate=self.dropout,
            broadcast_dropout=False,
            deterministic=not self.dropout,
            name=name,
        )
        return self.add(x, attention(x, memory, mask=mask), f"{name}_norm")

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Norm(x + Dropout(W2 Dropout(ReLU(W1 x))))."""
        hidden = self.drop(nn.relu(nn.Dense(self.d_ff, name="inner_proj")(x)))
        return self.add(x, nn.Dense(x.shape[-1], name="outer_proj")(hidden), "feed_forward_norm")

    def add(self, x: jax.Array, output: jax.Array, norm: str) -> jax.Array:
        """Norm(x + Dropout(output))."""
        return nn.LayerNorm(EPSILON, name=norm)(x + self.drop(output))

    def drop(self, x: jax.Array) -> jax.Array:
        """Dropout."""
        return nn.Dropout(self.dropout, deterministic=not self.dropout)(x)


class EncoderLayer(Sublayers):
    """Self-attention and feed-forward network."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, S, D) -> (B, S, D)."""
        return self.feed_forward(self.attend(x, x, None, "self_attention"))


class DecoderLayer(Sublayers):
    """Masked self-attention, cross-attention and feed-forward network."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        x = self.attend(x, x, mask, "self_attention")
        return self.feed_forward(self.attend(x, memory, None, "cross_attention"))


class LinenTransformer(nn.Module):
    """Encoder and decoder between a tied embedding and its transpose, without positions."""

    vocabulary: int
    d_model: int
    num_heads: int
    layers: int
    d_ff: int
    dropout: float

    @nn.compact
    def __call__(self, src: jax.Array, tgt: jax.Array) -> jax.Array:
        """Logits (B, T, V)."""
        embed = nn.Embed(self.vocabulary, self.d_model, name="embedding")
        sizes = self.num_heads, self.d_ff, self.dropout
        memory, x = embed(src), embed(tgt)
        for i in range(self.layers):
            memory = EncoderLayer(*sizes, name=f"encoder_{i}")(memory)
        memory = nn.LayerNorm(EPSILON, name="encoder_norm")(memory)
        mask = nn.make_causal_mask(tgt)
        for i in range(self.layers):
            x = DecoderLayer(*sizes, name=f"decoder_{i}")(x, memory, mask)
        return embed.attend(nn.LayerNorm(EPSILON, name="decoder_norm")(x))


def from_twin(arrays: Mapping[str, np.ndarray], num_heads: int) -> dict[str, Any]:
    """The parameters of `LinenTransformer` from those of a twin, by its names."""
    params: dict[str, Any] = {"embedding": {"embedding": jnp.asarray(arrays["src_embedding.embedding"])}}
    for name, array in arrays.items():
        stack, *path = name.split(".")
        if stack not in ("encoder", "decoder"):
            continue
        if path[0] == "final_norm":
            params.setdefault(f"{stack}_norm", {})[path[-1]] = jnp.asarray(array)
            continue
        _, layer, sublayer, *module, leaf = path
        group = params.setdefault(f"{stack}_{layer}", {})
        if sublayer.endswith("_residual"):
            group.setdefault(f"{sublayer.removesuffix('_residual')}_norm", {})[leaf] = jnp.asarray(array)
        elif sublayer == "feed_forward":
            group.setdefault(module[0], {})[leaf] = jnp.asarray(array)
        else:
            part = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}[module[0]]
            attention = group.setdefault(sublayer, {}).setdefault(part, {})
            attention[leaf] = _by_head(array, num_heads, part, leaf)
    return params


def _by_head(array: np.ndarray, num_heads: int, part: str, leaf: str) -> jax.Array:
    if part == "out":
        return jnp.asarray(array if leaf == "bias" else array.reshape(num_heads, -1, array.shape[-1]))
    return jnp.asarray(array.reshape(*array.shape[:-1], num_heads, -1))
