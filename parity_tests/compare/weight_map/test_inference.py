"""Inferred maps make a candidate's outputs equal to PyTorch's own; names and initial values are of no use."""

from itertools import count

import flax.linen as fl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from twinax import TransformerConfig, convert, flax_transformer
from twinax.compare.capture.models import capture
from twinax.compare.capture.trace import named
from twinax.compare.matching.matching import Deadline
from twinax.compare.weight_map import probing
from twinax.compare.weight_map.guesses import guesses, layouts
from twinax.compare.weight_map.inference import _Assembly, infer_weights
from twinax.compare.weight_map.probing import probe_converter
from twinax.compare.weight_map.rules import RulesError, apply_rules, inverse_layout, read_rules
from twinax.compare.weight_map.search import ParameterSearch
from twinax.parity.functions import random_arrays, random_batch

pytestmark = pytest.mark.newest

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 12))
TOKENS = RNG.integers(0, 37, (2, 6))
IMAGES = RNG.standard_normal((2, 3, 8, 8))


class Encoder(fl.Module):
    """A post-norm encoder layer; `packed` query, key and value."""

    packed: bool = False
    tanh: bool = False

    @fl.compact
    def __call__(self, x):
        if self.packed:
            q, k, v = (y.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3) for y in jnp.split(fl.Dense(36)(x), 3, -1))
            mixed = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2.0, -1) @ v
            y = fl.Dense(12)(mixed.transpose(0, 2, 1, 3).reshape(x.shape))
        else:
            y = fl.MultiHeadDotProductAttention(3, deterministic=True)(x, x)
        x = fl.LayerNorm(epsilon=1e-5)(x + y)
        y = fl.Dense(12)(fl.gelu(fl.Dense(12)(x), approximate=self.tanh))
        return fl.LayerNorm(epsilon=1e-5)(x + y)


class Separate(nn.Module):
    """The same layer in PyTorch, with projections of their own."""

    def __init__(self):
        super().__init__()
        self.z, self.y, self.x, self.w, self.u, self.t = (nn.Linear(12, 12) for _ in range(6))
        self.a, self.b = nn.LayerNorm(12), nn.LayerNorm(12)

    def forward(self, x):
        q, k, v = (layer(x).view(2, 5, 3, 4).transpose(1, 2) for layer in (self.w, self.y, self.z))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 12)
        x = self.a(x + self.x(mixed))
        return self.b(x + self.u(functional.gelu(self.t(x))))


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, without its last state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Convolutions(fl.Module):
    @fl.compact
    def __call__(self, x):
        x = fl.relu(fl.BatchNorm(use_running_average=True)(fl.Conv(8, (3, 3))(x)))
        x = fl.Conv(6, (3, 3), 2, padding="VALID")(x)
        return fl.Dense(10)(x.reshape(x.shape[0], -1))


class Block(fl.Module):
    @fl.compact
    def __call__(self, x, _):
        h = fl.RMSNorm()(x)
        return x + fl.Dense(8)(fl.silu(fl.Dense(12)(h)) * fl.Dense(12)(h)), None


class Stacked(fl.Module):
    """Layers in a scan, below a table with rows of padding."""

    @fl.compact
    def __call__(self, tokens):
        x = fl.Embed(40, 8)(tokens)
        scanned = fl.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return fl.Dense(40, use_bias=False)(scanned()(x, None)[0])


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.RMSNorm(8, eps=1e-6)
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.n(x)
        return x + self.c(functional.silu(self.a(h)) * self.b(h))


def tied_port(p, tokens):
    """A tied table, and a norm that stores scale - 1."""
    x = p["table"][tokens]
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + p["scale"])
    x = x + (jax.nn.silu(h @ p["one"] + p["e"]) * (h @ p["other"] + p["d"])) @ p["down"] + p["f"]
    return x @ p["table"].T


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block = nn.Embedding(40, 8), TorchBlock()

    def forward(self, tokens):
        return self.block(self.table(tokens)) @ self.table.weight.T


def linen(module, *inputs):
    """A module with parameters that are all 1: initial values are of no use."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return module, jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)


def tied_parameters():
    shapes = {"table": (40, 8), "one": (8, 12), "other": (8, 12), "down": (12, 8)}
    zeros = {"scale": (8,), "d": (12,), "e": (12,), "f": (8,)}
    return {n: jnp.ones(s) for n, s in shapes.items()} | {n: jnp.zeros(s) for n, s in zeros.items()}


def models(name):
    """(reference, candidate, inputs, candidate's inputs)."""
    layer = nn.TransformerEncoderLayer(12, 3, 12, batch_first=True, activation="gelu")
    steps = X[:, :4, :5].astype(np.float32)
    x = X.astype(np.float32)
    images = IMAGES.transpose(0, 2, 3, 1)
    stack = [nn.Embedding(37, 8), *(TorchBlock() for _ in range(3)), nn.Linear(8, 40, bias=False)]
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, 2)]
    return {
        "packed to heads": lambda: (layer, linen(Encoder(), x), X, X),
        "separate to packed": lambda: (Separate(), linen(Encoder(packed=True), x), X, X),
        "another gelu": lambda: (Separate(), linen(Encoder(tanh=True), x), X, X),
        "LSTM": lambda: (
            Recurrent(nn.LSTM(5, 6, batch_first=True)),
            linen(fl.RNN(fl.LSTMCell(6)), steps),
            steps,
            steps,
        ),
        "GRU": lambda: (Recurrent(nn.GRU(5, 6, batch_first=True)), linen(fl.RNN(fl.GRUCell(6)), steps), steps, steps),
        "convolutions": lambda: (
            nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(54, 10)),
            linen(Convolutions(), images.astype(np.float32)),
            IMAGES,
            images,
        ),
        "scan": lambda: (nn.Sequential(*stack), linen(Stacked(), TOKENS), TOKENS, TOKENS),
        "tied": lambda: (Tied(), (tied_port, tied_parameters()), TOKENS, TOKENS),
    }[name]()


def randomised(module):
    """A module in float64 whose biases and gains tell each other apart."""
    torch.manual_seed(1)
    module = module.double().eval()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.3 + torch.rand_like(tensor) if (tensor == 1).all() else 0.4 * torch.randn_like(tensor))
    return module


def run_jax(model, arrays, inputs, wide):
    """The output of a function or Linen module with these parameters, in float64 if `wide`."""
    function, parameters = model
    with jax.enable_x64(wide):
        names = [name for name, _ in named(parameters)]
        assert set(names) == set(arrays)
        leaves = [jnp.asarray(arrays[name]) for name in names]
        order = jax.tree.unflatten(jax.tree.structure(parameters), range(len(names)))
        paths = {index: name for name, index in named(order)}
        tree = jax.tree.map(lambda index: leaves[names.index(paths[index])], order)
        apply = function.apply if isinstance(function, fl.Module) else function
        return np.asarray(jax.jit(apply)(tree, jnp.asarray(inputs)))


def converter(inference):
    scope = {}
    exec(inference.converter(), scope)
    return scope["to_candidate"], scope["to_reference"]


NAMES = ["packed to heads", "separate to packed", "LSTM", "GRU", "convolutions", "scan", "tied"]


@pytest.mark.parametrize("name", NAMES)
def test_the_converted_candidate_computes_what_pytorch_computes(name, tmp_path):
    """Through the generated code, and through the rules file; there and back nothing changes."""
    module, candidate, inputs, candidate_inputs = models(name)
    inference = infer_weights(module.eval(), candidate, (inputs,), (candidate_inputs,))
    assert (inference.share, inference.guessed, inference.questions) == (1, (), {})
    module = randomised(module)
    state = {n: t.numpy() for n, t in module.state_dict().items() if t.is_floating_point()}
    to_candidate, to_reference = converter(inference)
    arrays = to_candidate(state)
    recurrent = name in ("LSTM", "GRU")  # Flax keeps their state in float32
    kind = np.int64 if inputs is TOKENS else np.float64
    expected = module(torch.as_tensor(inputs.astype(kind))).detach().numpy()
    output = run_jax(candidate, arrays, candidate_inputs.astype(kind), not recurrent)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5 if recurrent else 1e-6)
    back = to_reference(arrays)
    assert back.keys() == state.keys()
    if not recurrent:  # of which two biases are one
        assert all(np.allclose(back[n], state[n], rtol=1e-14, atol=1e-14) for n in state)
    (tmp_path / "rules.toml").write_text(inference.rules())
    rules = read_rules(tmp_path / "rules.toml", inference.source_shapes, inference.shapes)
    from_rules = apply_rules(rules, back, inference.shapes)
    for n, array in arrays.items():
        np.testing.assert_allclose(from_rules[n], array, rtol=1e-12, atol=1e-12)


def test_another_activation_function_does_not_stop_it():
    reference, candidate, inputs, _ = models("another gelu")
    exact = infer_weights(reference.eval(), linen(Encoder(), X.astype(np.float32)), (inputs,))
    inference = infer_weights(reference.eval(), candidate, (inputs,))
    assert inference.share == 1
    assert inference.weights.matches == exact.weights.matches


def test_our_twins_with_other_values():
    """The port's rules are the oracle; tables of positions keep their values."""
    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1, tied_output=True)
    models = [flax_transformer.Transformer.from_arrays(config, random_arrays(config, seed)) for seed in (0, 1)]
    batch = random_batch(config, np.random.default_rng(0), 3, 7, 5)
    inference = infer_weights(convert.to_torch(models[0]).eval(), models[1], (batch.src_tokens, batch.tgt_tokens))
    arrays = random_arrays(config, 2)
    state = {name: tensor.numpy() for name, tensor in convert.to_state_dict(arrays, config).items()}
    converted = apply_rules(inference.weights.matches, state, inference.shapes)
    assert converted.keys() | set(inference.fixed) == arrays.keys()
    assert all(np.array_equal(converted[name], arrays[name]) for name in converted)


def test_what_cannot_be_decided_is_assumed_and_may_be_given(tmp_path):
    """Two kernels whose outputs are added are interchangeable; one line of a rules file decides both."""
    reference = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    pair = (lambda p, x: x @ p["a"].T + x @ p["b"].T, {n: m.weight for n, m in reference.items()})
    candidate = (lambda p, x: x @ p["one"] + x @ p["two"], {"one": jnp.ones((4, 4)), "two": jnp.ones((4, 4))})
    x = (X[0, :, :4],)
    inference = infer_weights(pair, candidate, x)
    assert set(inference.weights.ambiguous) == {"one", "two"}
    assert set(inference.weights.ambiguous["one"]) == {"a", "b"}
    assert inference.assumptions[0] == '"one" = { source = "a", layout = "w.T" }'
    assert inference.weights.matches == inference.questions == {}
    (tmp_path / "rules.toml").write_text('"one" = { source = "b", layout = "w.T" }')
    rules = read_rules(tmp_path / "rules.toml", inference.source_shapes, inference.shapes)
    decided = infer_weights(pair, candidate, x, given=rules)
    assert decided.share == 1
    assert decided.weights.matches["two"].sources == ("a",)


class Rotary(nn.Module):
    """Self-attention and a gated feed-forward network, all of whose weights are square."""

    def __init__(self, names, half, up_first=False):
        super().__init__()
        self.names, self.half, self.up_first = names, half, up_first
        self.linear = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})

    def forward(self, x):
        q, k, v, out, gate, up, down = (self.linear[name] for name in self.names)
        weights = (self.rotated(q(x)) @ self.rotated(k(x)).mT).softmax(-1)
        x = x + out(weights @ v(x))
        wide = up(x) if self.up_first else None
        gates = torch.nn.functional.silu(gate(x))
        return x + down(gates * (up(x) if wide is None else wide))

    def rotated(self, x):
        sin, cos = (f(torch.arange(x.shape[1])[:, None] / torch.arange(1, 5)) for f in (torch.sin, torch.cos))
        one, other = x.chunk(2, -1) if self.half else (x[..., ::2], x[..., 1::2])
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("query", "key", "value", "out", "w1", "w3", "w2"), (0, 1, 2, 3, 4, 5, 6)),
        (("k", "v", "q", "o", "up", "down", "gate"), (2, 0, 1, 3, 6, 4, 5)),  # declared, and used, in another order
    ],
)
def test_weights_behind_a_mistake_are_assumed_from_order_and_names(names, order):
    """Pairs of the wrong elements are rotated, so no value after the first queries and keys is the reference's."""
    reference = Rotary(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), half=True)
    candidate = Rotary(tuple(names), half=False, up_first="up" in names)
    candidate.names = tuple(names[i] for i in order)
    inference = infer_weights(reference, candidate, (X[..., :8],))
    expected = {
        f"linear.{own}.weight": f"linear.{other}.weight"
        for own, other in zip(candidate.names, reference.names, strict=True)
    }
    assert {name: match.parts[0].source for name, match in inference.matches.items()} == expected
    assert len(inference.assumed) >= 4
    state = {name: tensor.detach().numpy() for name, tensor in reference.named_parameters()}
    arrays = apply_rules(inference.matches, state, inference.shapes)
    assert all(np.array_equal(arrays[own], state[other]) for own, other in expected.items())  # and none transposed


@pytest.mark.parametrize("shapes", [[(6,), (6,)], [(3, 2), (6,)], [(5,), (6,), (2, 3)]])
def test_of_several_free_sources_none_is_guessed(shapes):
    """A parameter that no result depends on, with sources that nothing else uses; one source alone is a guess."""
    free = {f"free{i}": RNG.standard_normal(shape) for i, shape in enumerate(shapes)}
    x = (X[0],)
    kernel = RNG.standard_normal((12, 4))
    candidate = (lambda p, x: x @ p["k"], {"k": kernel * 2, "idle": RNG.standard_normal(6)})
    inference = infer_weights((lambda p, x: x @ p["w"], {"w": kernel, **free}), candidate, x)
    assert "idle" in inference.questions
    assert inference.guessed == ()
    assert inference.weights.matches.keys() == {"k"}
    one = infer_weights((lambda p, x: x @ p["w"], {"w": kernel, "free": RNG.standard_normal(6)}), candidate, x)
    assert one.guessed == ("idle",)


ERRORS = {
    "= 3": "cannot be read as TOML",
    '"other" = { source = "w" }': "no such parameter",
    '"k" = { source = "v" }': "no parameter v",
    '"k" = { source = "w", layout = "w[0]" }': "has 3 numbers, and 6 are needed",
    '"k" = { source = "w", layout = "w.sum()" }': "not allowed",
    '"k" = { source = "w", layout = "__import__(\'os\').getcwd()" }': "not allowed",
    '"k" = { source = "w", layout = "w.T.reshape(4, 2)" }': "cannot reshape",
    '"k" = { source = "w", size = 2 }': "either a source or parts",
    '"k" = { parts = [{ source = "w", region = "0:4, 0:2" }] }': "not within",
    '"k" = { parts = [{ source = "w", layout = "w[0]", region = "0:3, 0:1" }] }': "have 3 numbers",
    '"k" = { source = "w", add = "b" }': "no parameter of the source's shape",
}


@pytest.mark.parametrize("text", ERRORS)
def test_a_wrong_rule_is_named_in_one_line(text, tmp_path):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(RulesError, match=r"rules\.toml") as error:
        read_rules(tmp_path / "rules.toml", {"w": (2, 3), "b": (3,)}, {"k": (3, 2)})
    assert ERRORS[text] in str(error.value)
    assert "\n" not in str(error.value)


@given(st.data(), st.lists(st.integers(2, 5), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_transpositions_splits_and_parts_are_guessed(data, shape):
    source = np.arange(np.prod(shape)).reshape(shape)
    target = source.transpose(data.draw(st.permutations(range(len(shape)))))
    if data.draw(st.booleans()):
        target = target.reshape(-1, *target.shape[2:])  # two axes joined
    possible = [layout for _, layout, _ in layouts(tuple(shape), target.shape)]
    chosen = [layout for layout in possible if np.array_equal(layout.apply(source), target)]
    assert chosen
    assert np.array_equal(inverse_layout(chosen[0], source.shape).apply(target), source)
    part = np.split(source, shape[0])[-1][0].T
    assert any(np.array_equal(layout.apply(source), part) for _, layout, _ in layouts(tuple(shape), part.shape))


@given(st.integers(0, 2**31), st.permutations(range(3)), st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_converter_is_probed(seed, order, flat):
    """It has one bias twice, constants that are equal, and rounds to float32."""
    reference = {f"w{i}": np.zeros((6, 4), np.float32) for i in range(3)}
    reference |= {
        "b0": np.zeros(6),
        "b1": np.zeros(6),
        "scale": np.ones(4),
        "table": np.ones((5, 4)),
        "ids": np.arange(3),
    }

    def convert_arrays(arrays):
        packed = np.concatenate([arrays[f"w{i}"].T for i in order], 1)
        packed = packed.reshape(-1, 3, 6) if flat else {"kernel": packed}
        bias = (arrays["b0"] + arrays["b1"]).astype(np.float32)
        return {
            "qkv": packed,
            "bias": bias,
            "norm": jnp.asarray(arrays["scale"] - 1),
            "padded": np.pad(arrays["table"], ((0, 3), (0, 0))),
        }

    weights = probe_converter(convert_arrays, reference)
    assert weights.ok
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in reference.items() if n != "ids"}
    expected = {n: np.asarray(a) for n, a in named(convert_arrays(arrays))}
    converted = apply_rules(weights.matches, arrays, {n: a.shape for n, a in expected.items()})
    assert converted.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(converted[name], array, rtol=1e-6, atol=1e-6)


def test_a_converter_of_more_numbers_than_float32_has(monkeypatch):
    """With digits of base 100, as if float32 had 100 numbers."""
    monkeypatch.setattr(probing, "_BASE", 100)
    reference = {"table": np.zeros((21, 20), np.float32), "w": np.zeros((3, 2), np.float32)}
    weights = probe_converter(lambda a: {"t": a["table"].T, "w": a["w"][::-1]}, reference)
    assert weights.ok
    assert weights.matches["t"].parts[0].layout.code("w", (21, 20)) == "w.T"
    assert weights.matches["w"].parts[0].layout.code("w", (3, 2)) == "w[::-1]"


def test_a_table_of_which_the_reference_uses_rows_is_no_parameter():
    """The port stores sinusoidal positions for 50 tokens; the reference computes those of the sentence."""
    angles = np.arange(50)[:, None] / 100 ** (np.arange(8) / 8)
    table = np.sin(angles)

    def computed(p, ids):
        return p["embedding"][ids] + jnp.sin(jnp.arange(ids.shape[1])[:, None] / 100 ** (jnp.arange(8) / 8))

    def stored(p, ids):
        return p["w"][ids] + p["table"][: ids.shape[1]]

    random = np.random.default_rng(0)
    models = (
        (computed, {"embedding": random.standard_normal((11, 8))}),
        (stored, {"w": np.zeros((11, 8)) + 1, "table": table}),
    )
    inference = infer_weights(*models, (random.integers(0, 11, (3, 6)),))
    assert inference.fixed == ("table",)
    assert inference.weights.matches["w"].sources == ("embedding",)


KERNELS = {"a": RNG.standard_normal((12, 12)), "b": RNG.standard_normal((12, 12))}


def exchanged(function):
    """Two models of a function, the second with other parameters."""
    return (function, KERNELS), (function, {"a": 2 * KERNELS["b"], "b": 2 * KERNELS["a"]})


def test_progress_counts_what_is_decided():
    shown = []
    models = exchanged(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"])
    inference = infer_weights(*models, (X[0],), progress=lambda decided, count: shown.append((decided, count)))
    assert {name: match.parts[0].source for name, match in inference.weights.matches.items()} == {"a": "a", "b": "b"}
    assert (shown[-1], inference.reason) == ((2, 2), "")


def test_a_search_that_ends_in_the_middle_decides_nothing_wrong(monkeypatch):
    """Both kernels may be exchanged. If only the first choice that fits were tried, it would seem the only one."""
    models = exchanged(lambda p, x: x @ p["a"] + x @ p["b"])
    reasons = []
    for calls in range(40):
        counter = count()
        monkeypatch.setattr(Deadline, "is_over", property(lambda deadline, n=calls, c=counter: next(c) >= n))
        inference = infer_weights(*models, (X[0],))
        assert inference.weights.matches == {}
        reasons.append(inference.reason)
    assert (reasons[0], reasons[-1]) == ("the search stopped after 60 s", "")


@pytest.fixture
def kernel_and_bias():
    """The search for a kernel and a bias, and the first guess for each of their arrangements."""
    models = [(lambda p, x: x @ p["a"] + p["b"], {"a": k[:, :5], "b": k[0, :5]}) for k in KERNELS.values()]
    return search_and_guesses(models, "ab")


def search_and_guesses(models, names):
    """A search for the candidate's parameters of these names, and by block the guesses from the source of its name."""
    search = ParameterSearch(*(capture(model, (X[0],)) for model in models), (("a", "b"), tuple(names)))
    sizes = {key: array.shape for key, array in search.arrays.items()}
    own = {key: [g for g in guesses(block.shape, sizes) if g.source == key] for key, block in search.open.items()}
    return search, own


@pytest.mark.parametrize("number", [0, 1])
def test_a_decided_block_decides_the_others_of_its_group(kernel_and_bias, number):
    """Of two options, the one that agrees with what was decided is left; what it says about the rest is taken."""
    search, own = kernel_and_bias
    a, b = own
    search.groups = [[{a: own[a][i], b: own[b][i]} for i in (0, 1)]]
    search.decide({a: own[a][number]})
    assert search.open == {}
    assert search.groups == []
    assert search.decided[b][1] == own[b][number]


def test_a_parameter_left_over_decides_the_others_of_its_group():
    """One of them is zero, so the only source of its size is left for another bias."""
    a, b = KERNELS["a"][:, :5], KERNELS["b"][0, :5]
    reference = lambda p, x: x @ p["a"] + p["b"], {"a": a, "b": b}
    candidate = lambda p, x: x @ p["a"] + p["b"] + p["c"], {"a": 2 * a, "b": 2 * b, "c": 3 * b}
    search, own = search_and_guesses((reference, candidate), "abc")
    a, b, _ = own
    zero = next(guess for guess in guesses((5,), {}) if not guess.source)
    search.groups = [[{a: own[a][0], b: zero}, {a: own[a][1], b: own[b][0]}]]
    traces = search.reference.trace, search.candidate
    arrays = [{name: trace.values[n] for name, n in trace.parameters.items()} for trace in traces]
    assert _Assembly(search, arrays, ("a", "b"))._exclude() == ["a", "c"]
    assert search.open == {}
