"""Mistakes that repeat in every step of a recurrence are one line: a folded bias, and the mask of a cache."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from twinax.compare.repair.diagnosis import diagnose


class Recurrent(nnx.Module):
    """NNX's GRU has no second bias, which PyTorch's adds before the reset gate."""

    def __init__(self, inputs, width, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(inputs, width, rngs=rngs))

    def __call__(self, x):
        return self.rnn(x)  # folded


def test_folded_biases_are_a_row_per_layer_also_beside_another_mistake():
    torch.manual_seed(3)
    reference = nn.Sequential(nn.GRU(6, 4, 2, batch_first=True), First(), nn.GELU()).eval()
    state = {name.removeprefix("0."): p.detach().numpy() for name, p in reference.named_parameters()}
    for layer in "01":
        state[f"bias_ih_l{layer}"] = state[f"bias_ih_l{layer}"] + state.pop(f"bias_hh_l{layer}")

    def port(p, x):
        for layer in "01":

            def step(h, xt, layer=layer):
                inner = xt @ p[f"weight_ih_l{layer}"].T + p[f"bias_ih_l{layer}"]
                outer = h @ p[f"weight_hh_l{layer}"].T  # folded
                r, z = jax.nn.sigmoid(inner[:, :4] + outer[:, :4]), jax.nn.sigmoid(inner[:, 4:8] + outer[:, 4:8])
                h = (1 - z) * jnp.tanh(inner[:, 8:] + r * outer[:, 8:]) + z * h
                return h, h

            x = jnp.swapaxes(jax.lax.scan(step, jnp.zeros((len(x), 4)), jnp.swapaxes(x, 0, 1))[1], 0, 1)
        return jax.nn.gelu(x)  # activation

    diagnosis = diagnose(reference, (port, state), (np.random.default_rng(0).standard_normal((2, 3, 6)),))
    test = test_folded_biases_are_a_row_per_layer_also_beside_another_mistake
    assert [(*defect.lines, str(defect.repair)) for defect in diagnosis.defects] == [
        (_line(test, "folded"), "missing: + 0.bias_hh_l0, which bias_ih_l0 contains instead"),
        (_line(test, "folded"), "missing: + 0.bias_hh_l1, which bias_ih_l1 contains instead"),
        (_line(test, "activation"), "should be erf gelu"),
    ]
    assert diagnosis.verified


def test_a_bias_that_the_port_adds_twice():
    torch.manual_seed(3)
    reference = nn.Sequential(nn.GRU(3, 4, batch_first=True), First(), nn.GELU()).eval()
    arrays = [p.detach().numpy() for p in reference.parameters()]
    last = arrays[3][8:]  # which Equinox's cell has apart
    arrays = [*arrays[:2], arrays[2] + arrays[3], last]
    cell = eqx.nn.GRUCell(3, 4, key=jax.random.key(0))
    names = ("weight_ih", "weight_hh", "bias", "bias_n")
    cell = eqx.tree_at(lambda cell: [getattr(cell, name) for name in names], cell, arrays)

    class Port(eqx.Module):
        cell: eqx.nn.GRUCell

        def __call__(self, x):
            step = lambda h, xt: 2 * (self.cell(xt, h),)  # noqa: E731
            return jax.nn.gelu(jax.vmap(lambda one: jax.lax.scan(step, jnp.zeros(4), one)[1])(x))

    diagnosis = diagnose(reference, Port(cell), (np.random.default_rng(0).standard_normal((2, 3, 3)),))
    repairs = [str(defect.repair) for defect in diagnosis.defects]
    assert repairs == ["cell.bias without 0.bias_hh_l0[8:12], which cell.bias_n adds too", "should be erf gelu"]
    assert diagnosis.verified


@pytest.mark.parametrize(("inputs", "width", "length"), [(6, 8, 5), (3, 4, 2)])
def test_a_bias_that_was_added_to_another_is_one_missing_step(inputs, width, length):
    torch.manual_seed(3)
    reference = nn.GRU(inputs, width, batch_first=True).eval()
    state = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    port = Recurrent(inputs, width, nnx.Rngs(0))
    cell = port.rnn.cell
    cell.dense_i.kernel[...] = jnp.asarray(state["weight_ih_l0"].T)
    cell.dense_h.kernel[...] = jnp.asarray(state["weight_hh_l0"].T)
    cell.dense_i.bias[...] = jnp.asarray(state["bias_ih_l0"] + state["bias_hh_l0"])
    x = np.random.default_rng(0).standard_normal((2, length, inputs))
    first = nn.Sequential(reference, First()).eval()
    diagnosis = diagnose(first, port, (x,))
    (defect,) = diagnosis.defects
    assert defect.lines == (_line(Recurrent, "folded"),)
    assert str(defect.repair) == "missing: + 0.bias_hh_l0, which rnn.cell.dense_i.bias contains instead"
    assert diagnosis.verified


class Summed(nn.Module):
    """Two linear maps whose biases may be one, and the second one's weights again, without its bias."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x):
        y = self.a(x) + self.b(x[:, [1, 0, 3, 2, 5, 4]])
        return nn.functional.gelu(y) + nn.functional.linear(x, self.b.weight)


def test_a_sum_of_biases_that_is_right_is_no_mistake_beside_another():
    torch.manual_seed(0)
    reference = Summed().eval()
    state = {name: p.detach().numpy().astype(np.float64) for name, p in reference.named_parameters()}
    state["sum"] = state.pop("a.bias") + state.pop("b.bias")

    def port(p, x):
        y = x @ p["a.weight"].T + x[:, np.array([1, 0, 3, 2, 5, 4])] @ p["b.weight"].T + p["sum"]
        return jax.nn.gelu(y) + x @ p["b.weight"].T

    diagnosis = diagnose(reference, (port, state), (np.random.default_rng(0).standard_normal((4, 6)),))
    assert [str(defect.repair) for defect in diagnosis.defects] == ["should be erf gelu"]
    assert diagnosis.verified


class First(nn.Module):
    """The outputs without the last state."""

    def forward(self, outputs):
        return outputs[0]


class Decoder(nn.Module):
    """One attention layer with a causal mask."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        return x + scores.softmax(-1) @ self.v(x)


def linear(p, n, x):
    return x @ p[f"{n}.weight"].T + p[f"{n}.bias"]


def cached(p, ids):
    rows, length = ids.shape

    def step(cache, t):
        x = p["embed.weight"][ids[:, t]]
        keys = jax.lax.dynamic_update_slice(cache[0], linear(p, "k", x)[:, None], (0, t, 0))
        values = jax.lax.dynamic_update_slice(cache[1], linear(p, "v", x)[:, None], (0, t, 0))
        scores = jnp.einsum("bd,bkd->bk", linear(p, "q", x), keys)
        scores = jnp.where(jnp.arange(length + 2) < t, scores, -1e30)  # mask
        return (keys, values), x + jnp.einsum("bk,bkd->bd", jax.nn.softmax(scores, -1), values)

    empty = jnp.zeros((rows, length + 2, p["q.weight"].shape[0]), p["q.weight"].dtype)
    return jnp.swapaxes(jax.lax.scan(step, (empty, empty), jnp.arange(length))[1], 0, 1)


@pytest.mark.parametrize(("width", "length"), [(8, 5), (6, 3)])
def test_the_mask_of_a_cache_is_one_line_in_all_steps(width, length):
    torch.manual_seed(0)
    reference = Decoder(width).eval()
    state = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    diagnosis = diagnose(reference, (cached, state), (np.random.default_rng(0).integers(0, 20, (2, length)),))
    (defect,) = diagnosis.defects
    assert (defect.lines, str(defect.repair)) == ((_line(cached, "mask"),), "lt → <=")
    assert diagnosis.verified


class Packed(nn.Module):
    """A recurrence in both directions over sequences of several lengths."""

    def __init__(self, inputs, width):
        super().__init__()
        self.rnn = nn.RNN(inputs, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def tanh_rnn(p, suffix, x):
    def step(h, xt):
        xt = xt @ p[f"rnn.weight_ih_l0{suffix}"].T + p[f"rnn.bias_ih_l0{suffix}"]
        h = jnp.tanh(xt + h @ p[f"rnn.weight_hh_l0{suffix}"].T + p[f"rnn.bias_hh_l0{suffix}"])
        return h, h

    start = jnp.zeros((len(x), p["rnn.weight_hh_l0"].shape[0]))
    return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def padded(p, x, lengths):
    both = [tanh_rnn(p, "", x), tanh_rnn(p, "_reverse", x[:, ::-1])[:, ::-1]]  # packed
    return linear(p, "out", jnp.concatenate(both, axis=-1))


@pytest.mark.parametrize(("lengths", "inputs", "width"), [((4, 2), 5, 4), ((3, 5, 1), 2, 3)])
def test_a_reversal_that_includes_the_padding_is_named(lengths, inputs, width):
    torch.manual_seed(0)
    reference = Packed(inputs, width).eval()
    state = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    x = np.random.default_rng(0).standard_normal((len(lengths), max(lengths), inputs))
    diagnosis = diagnose(reference, (padded, state), (x, np.array(lengths)))
    (defect,) = diagnosis.defects
    assert defect.lines == (_line(padded, "packed"),)
    assert str(defect.repair).startswith("reverses the padding too: reverse each row within its length, input 1")
    assert diagnosis.verified


def _line(function, name):
    lines, first = inspect.getsourcelines(function)
    number = first + [line.rstrip().endswith(f"# {name}") for line in lines].index(True)
    return f"repair/test_compared_recurrences.py:{number}"
