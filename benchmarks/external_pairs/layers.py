"""PyTorch's own layers beside the same layers in Linen and Equinox, with the weights copied."""

import copy
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import Tensor, nn

from benchmarks.external_pairs.pair import Pair, keep_mask, random_parameters

WIDTH, HEADS, INNER, LENGTH, BATCH = 15, 3, 17, 7, 3
HEAD = WIDTH // HEADS


def array(tensor: Tensor) -> np.ndarray:
    """A parameter in float64, in which biases are added without rounding."""
    return tensor.detach().double().numpy()


def linear(module: Any) -> dict[str, Any]:
    """The parameters of a Dense or Conv layer in Linen, or of a norm."""
    if module.weight.ndim == 1:
        return {"scale": array(module.weight), "bias": array(module.bias)}
    weight = module.weight.permute(*range(2, module.weight.ndim), 1, 0)
    return {"kernel": array(weight), "bias": array(module.bias)}


def attention(module: nn.MultiheadAttention) -> dict[str, Any]:
    """The parameters of Linen's attention: heads are axes of its kernels."""
    parameters: dict[str, Any] = {}
    for name, weight, bias in zip(
        ("query", "key", "value"), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True
    ):
        parameters[name] = {
            "kernel": array(weight.T.reshape(WIDTH, HEADS, HEAD)),
            "bias": array(bias.reshape(HEADS, HEAD)),
        }
    out = module.out_proj
    parameters["out"] = {"kernel": array(out.weight.T.reshape(HEADS, HEAD, WIDTH)), "bias": array(out.bias)}
    return parameters


class Norm(linen.LayerNorm):
    """A LayerNorm with PyTorch's epsilon."""

    epsilon: float = 1e-5


class LinenEncoderLayer(linen.Module):
    """The counterpart of `nn.TransformerEncoderLayer`."""

    pre_norm: bool
    gelu: bool

    @linen.compact
    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        """The layer's output; `keep`: False is padding."""
        mask = keep[:, None, None, :]
        attend = linen.MultiHeadDotProductAttention(HEADS, deterministic=True, name="self_attn")
        norm1, norm2 = Norm(name="norm1"), Norm(name="norm2")
        first, second = linen.Dense(INNER, name="linear1"), linen.Dense(WIDTH, name="linear2")
        if self.pre_norm:
            y = norm1(x)
            x = x + attend(y, mask=mask)
            hidden = first(norm2(x))
        else:
            x = norm1(x + attend(x, mask=mask))
            hidden = first(x)
        hidden = jax.nn.gelu(hidden, approximate=False) if self.gelu else jax.nn.relu(hidden)
        x = x + second(hidden)
        return x if self.pre_norm else norm2(x)


class LinenDecoderLayer(linen.Module):
    """The counterpart of `nn.TransformerDecoderLayer`, norms after the sublayers."""

    @linen.compact
    def __call__(self, x: jax.Array, memory: jax.Array, keep: jax.Array) -> jax.Array:
        """The layer's output; `keep`: False is padding of the memory."""
        positions = jnp.arange(x.shape[1])
        causal = positions[:, None] >= positions[None, :]
        own = linen.MultiHeadDotProductAttention(HEADS, deterministic=True, name="self_attn")
        cross = linen.MultiHeadDotProductAttention(HEADS, deterministic=True, name="multihead_attn")
        x = Norm(name="norm1")(x + own(x, mask=causal[None, None]))
        x = Norm(name="norm2")(x + cross(x, memory, mask=keep[:, None, None, :]))
        hidden = jax.nn.silu(linen.Dense(INNER, name="linear1")(x))
        return Norm(name="norm3")(x + linen.Dense(WIDTH, name="linear2")(hidden))


class _Masked(nn.Module):
    """A layer that takes the padding as `keep`, with True where it is not padding."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, key_padding_mask=~keep, need_weights=False)[0]
        return self.layer(x, src_key_padding_mask=~keep)


class _Decoder(nn.Module):
    def __init__(self, layer: nn.TransformerDecoderLayer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=causal, memory_key_padding_mask=~keep)


def _sequences(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BATCH, length, WIDTH))


def encoder_layer(pre_norm: bool, activation: str) -> Pair:
    """`nn.TransformerEncoderLayer` and Linen."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, INNER, activation=activation, batch_first=True, norm_first=pre_norm, dropout=0.0
    )
    random_parameters(layer)
    parts = ("linear1", "linear2", "norm1", "norm2")
    weights = {"self_attn": attention(layer.self_attn)} | {name: linear(getattr(layer, name)) for name in parts}
    candidate = (LinenEncoderLayer(pre_norm, activation == "gelu"), {"params": weights})
    return Pair(_Masked(layer).eval(), candidate, (_sequences(1), keep_mask(BATCH, LENGTH)))


def decoder_layer() -> Pair:
    """`nn.TransformerDecoderLayer` and Linen."""
    layer = nn.TransformerDecoderLayer(
        WIDTH, HEADS, INNER, activation=nn.functional.silu, batch_first=True, dropout=0.0
    )
    random_parameters(layer)
    parts = ("linear1", "linear2", "norm1", "norm2", "norm3")
    weights = {name: attention(getattr(layer, name)) for name in ("self_attn", "multihead_attn")}
    weights |= {name: linear(getattr(layer, name)) for name in parts}
    inputs = (_sequences(1, 5), _sequences(2), keep_mask(BATCH, LENGTH))
    return Pair(_Decoder(layer).eval(), (LinenDecoderLayer(), {"params": weights}), inputs)


class EquinoxAttention(eqx.Module):
    """Equinox's attention over a batch."""

    inner: eqx.nn.MultiheadAttention

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        """The mixed values; `keep`: False is padding."""

        def one(row: jax.Array, mask: jax.Array) -> jax.Array:
            return self.inner(row, row, row, mask=jnp.tile(mask, (len(mask), 1)))

        return jax.vmap(one)(x, keep)


def equinox_attention() -> Pair:
    """`nn.MultiheadAttention` and Equinox."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    random_parameters(module)
    biased = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    model = eqx.nn.MultiheadAttention(HEADS, WIDTH, **biased, key=jax.random.key(0))
    sources = [*zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)]
    sources.append((module.out_proj.weight, module.out_proj.bias))
    names = ("query_proj", "key_proj", "value_proj", "output_proj")
    for name, (weight, bias) in zip(names, sources, strict=True):
        model = eqx.tree_at(lambda m, n=name: getattr(m, n).weight, model, array(weight))
        model = eqx.tree_at(lambda m, n=name: getattr(m, n).bias, model, array(bias))
    return Pair(_Masked(module).eval(), EquinoxAttention(model), (_sequences(3), keep_mask(BATCH, LENGTH)))


class LinenRecurrent(linen.Module):
    """A recurrent cell of Linen over a batch of sequences."""

    kind: str

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The state after each step."""
        cell = linen.OptimizedLSTMCell(11) if self.kind == "LSTM" else linen.GRUCell(11)
        return linen.RNN(cell, name="rnn")(x)


class _Outputs(nn.Module):
    """A recurrent layer of PyTorch without its last state."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _gates(layer: Any) -> tuple[Mapping[str, Tensor], ...]:
    """(input weights, state weights, input biases, state biases) by gate."""
    layer = copy.deepcopy(layer).double()
    names = "ifgo" if isinstance(layer, nn.LSTM) else "rzn"
    tensors = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)
    return tuple(dict(zip(names, tensor.chunk(len(names)), strict=True)) for tensor in tensors)


def linen_recurrent(kind: str) -> Pair:
    """`nn.LSTM` or `nn.GRU`, and Linen's cell, whose gates are separate layers with one bias instead of two."""
    layer = getattr(nn, kind)(WIDTH, 11, batch_first=True)
    random_parameters(layer)
    inputs, states, input_bias, state_bias = _gates(layer)
    cell: dict[str, Any] = {}
    for gate in inputs:
        cell[f"i{gate}"] = {"kernel": array(inputs[gate].T)}
        cell[f"h{gate}"] = {"kernel": array(states[gate].T)}
        if gate == "n":
            cell["in"]["bias"], cell["hn"]["bias"] = array(input_bias[gate]), array(state_bias[gate])
        else:
            cell[f"{'h' if kind == 'LSTM' else 'i'}{gate}"]["bias"] = array(input_bias[gate] + state_bias[gate])
    name = "OptimizedLSTMCell_0" if kind == "LSTM" else "GRUCell_0"
    candidate = (LinenRecurrent(kind), {"params": {name: cell}})
    return Pair(_Outputs(layer).eval(), candidate, (_sequences(4, 5),))


class EquinoxRecurrent(eqx.Module):
    """A recurrent cell of Equinox over a batch of sequences."""

    cell: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """The state after each step."""
        start = jnp.zeros((len(x), self.cell.hidden_size), x.dtype)
        is_lstm = isinstance(self.cell, eqx.nn.LSTMCell)

        def step(state: Any, row: jax.Array) -> Any:
            state = jax.vmap(self.cell)(row, state)
            return state, state[0] if is_lstm else state

        outputs = jax.lax.scan(step, (start, start) if is_lstm else start, x.swapaxes(0, 1))[1]
        return outputs.swapaxes(0, 1)


def equinox_recurrent(kind: str) -> Pair:
    """`nn.LSTM` or `nn.GRU`, and Equinox's cell, which has packed gates and one bias."""
    layer = getattr(nn, kind)(WIDTH, 11, batch_first=True)
    random_parameters(layer)
    cell: Any = getattr(eqx.nn, f"{kind}Cell")(WIDTH, 11, key=jax.random.key(0))
    _, _, input_bias, state_bias = _gates(layer)
    bias = torch.cat([input_bias[g] + (0 if g == "n" else state_bias[g]) for g in input_bias])
    values = [layer.weight_ih_l0, layer.weight_hh_l0, bias]
    cell = eqx.tree_at(lambda c: (c.weight_ih, c.weight_hh, c.bias), cell, tuple(map(array, values)))
    if kind == "GRU":
        cell = eqx.tree_at(lambda c: c.bias_n, cell, array(state_bias["n"]))
    return Pair(_Outputs(layer).eval(), EquinoxRecurrent(cell), (_sequences(5, 5),))


class LinenConv(linen.Module):
    """Two convolutions, channels last, then the mean of all positions."""

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits."""
        x = jax.nn.relu(linen.Conv(5, (3, 3), padding=1, name="0")(images))
        x = jnp.tanh(linen.Conv(7, (3, 3), strides=2, padding=1, name="2")(x))
        x = x.mean((1, 2))
        return linen.Dense(6, name="6")(x)


def linen_convolutions() -> Pair:
    """A stack of convolutions, channels first, and Linen, channels last."""
    module = nn.Sequential(
        *(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 7, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 6)),
    )
    random_parameters(module)
    weights = {name: linear(module[int(name)]) for name in ("0", "2", "6")}
    images = np.random.default_rng(6).standard_normal((2, 3, 11, 11))
    return Pair(module.eval(), (LinenConv(), {"params": weights}), (images,), (images.transpose(0, 2, 3, 1),))


class EquinoxMLP(eqx.Module):
    """Two layers with a norm each, and a residual connection."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.LayerNorm

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output of each row."""
        return jax.vmap(self._row)(x)

    def _row(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(self.first(self.norm(x)))
        x = x + self.second(hidden)
        return self.last(x)


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.second(nn.functional.silu(self.first(self.norm(x)))))


def equinox_mlp() -> Pair:
    """An MLP of PyTorch and one of Equinox."""
    module = _MLP()
    random_parameters(module)
    key = jax.random.key(0)
    model = EquinoxMLP(
        eqx.nn.Linear(WIDTH, INNER, key=key),
        eqx.nn.Linear(INNER, WIDTH, key=key),
        eqx.nn.LayerNorm(WIDTH),
        eqx.nn.LayerNorm(WIDTH),
    )
    for name, part in module.named_children():
        for kind, tensor in part.named_parameters():
            model = eqx.tree_at(lambda m, n=name, k=kind: getattr(getattr(m, n), k), model, array(tensor))
    return Pair(module.eval(), model, (np.random.default_rng(7).standard_normal((5, WIDTH)),))


LAYERS = {
    "Linen encoder layer, post-norm": lambda: encoder_layer(False, "relu"),
    "Linen encoder layer, pre-norm": lambda: encoder_layer(True, "gelu"),
    "Linen decoder layer": decoder_layer,
    "Linen LSTM": lambda: linen_recurrent("LSTM"),
    "Linen GRU": lambda: linen_recurrent("GRU"),
    "Linen convolutions": linen_convolutions,
    "Equinox attention": equinox_attention,
    "Equinox LSTM": lambda: equinox_recurrent("LSTM"),
    "Equinox GRU": lambda: equinox_recurrent("GRU"),
    "Equinox MLP": equinox_mlp,
}


class _Recurrent(nn.Module):
    """An embedding, a recurrent layer and a norm without a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(29, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.layer = nn.RNN(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.norm(self.table(tokens)))[0]


def converted_by_values() -> Pair:
    """A recurrent model, and a function whose parameters are a padded table, scale - 1, and a sum of two biases."""
    module = _Recurrent()
    random_parameters(module)
    layer: Any = module.layer
    parameters = {
        "table": np.pad(array(module.table.weight), ((0, 3), (0, 0))),
        "scale": array(module.norm.weight) - 1,
        "inputs": array(layer.weight_ih_l0.T),
        "states": array(layer.weight_hh_l0.T),
        "bias": array(layer.bias_ih_l0.double() + layer.bias_hh_l0.double()),
    }

    def port(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["table"][tokens]
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + p["scale"])
        state, outputs = jnp.zeros((len(x), WIDTH), x.dtype), []
        for step in range(x.shape[1]):
            state = jnp.tanh(x[:, step] @ p["inputs"] + state @ p["states"] + p["bias"])
            outputs.append(state)
        return jnp.stack(outputs, 1)

    tokens = np.random.default_rng(8).integers(0, 29, (BATCH, LENGTH))
    return Pair(module.eval(), (port, parameters), (tokens,))


# pairs for mistakes in converters alone: the others pad, shift and add nothing
CONVERTED = {"padded, shifted, added": converted_by_values}
