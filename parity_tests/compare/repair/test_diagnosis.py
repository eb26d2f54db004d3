"""Diagnosis of pairs: no false alarm on correct ports, and planted mistakes at their lines, several at once."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from twinax import TransformerConfig, convert, flax_transformer
from twinax.compare.capture.models import capture
from twinax.compare.matching.matching import EXACT, ROUNDED, Side, same_order
from twinax.compare.repair import divergence
from twinax.compare.repair.diagnosis import diagnose
from twinax.parity.functions import random_arrays, random_batch
from twinax.parity.oracles import published

D, HEADS, LAYERS, VOCAB = 12, 3, 2, 23


class Encoder(nn.Module):
    """The reference, of PyTorch's own layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        layer = nn.TransformerEncoderLayer(D, HEADS, 20, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).layers)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 7)

    def forward(self, tokens):
        x = self.embedding(tokens) * D**0.5
        padding = tokens == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(self.norm(x))


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    module = Encoder().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return module


@pytest.fixture(scope="module")
def parameters(reference):
    return {name: jnp.asarray(tensor.numpy()) for name, tensor in reference.state_dict().items()}


def norm(x, p, name, eps=1e-5):
    centered = x - x.mean(-1, keepdims=True)
    return (
        centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + eps) * p[f"{name}.weight"]
        + p[f"{name}.bias"]
    )


def heads(y):
    return y.reshape(*y.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)


def attention(p, x, mask, name, wrong):
    packed = x @ p[f"{name}.in_proj_weight"].T + p[f"{name}.in_proj_bias"]
    if "q and k" in wrong:
        k, q, v = jnp.split(packed, 3, -1)  # q and k
    else:
        q, k, v = jnp.split(packed, 3, -1)
    scores = heads(q) @ heads(k).transpose(0, 1, 3, 2) / (D // HEADS) ** 0.5
    if "scale" in wrong:
        scores = scores * (D // HEADS) ** 0.5  # scale
    scores = jnp.where(mask, scores, -jnp.inf)
    if "axis" in wrong:
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-2)  # axis
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    mixed = (weights @ heads(v)).transpose(0, 2, 1, 3).reshape(x.shape)
    if "heads" in wrong:
        mixed = (weights @ heads(v)).reshape(x.shape)  # heads
    out = mixed @ p[f"{name}.out_proj.weight"].T  # out
    return out if "bias" in wrong else out + p[f"{name}.out_proj.bias"]


def port(p, tokens, wrong=frozenset()):
    x = p["embedding.weight"][tokens] * D**0.5
    mask = (tokens != 0)[:, None, None, :]
    if "mask" in wrong:
        mask = jnp.roll(mask, 1, -1)  # mask
    for i in range(LAYERS):
        name = f"layers.{i}"
        x = x + attention(p, norm(x, p, f"{name}.norm1"), mask, f"{name}.self_attn", wrong if i else wrong - {"bias"})
        inner = norm(x, p, f"{name}.norm2") @ p[f"{name}.linear1.weight"].T + p[f"{name}.linear1.bias"]
        inner = jax.nn.gelu(inner, approximate="gelu" in wrong)  # gelu
        x = x + inner @ p[f"{name}.linear2.weight"].T + p[f"{name}.linear2.bias"]
    x = norm(x, p, "norm", eps=1e-3 if "eps" in wrong else 1e-5)  # eps
    return x @ p["head.weight"].T + p["head.bias"]


TOKENS = np.array([[3, 4, 5, 6, 9, 11], [7, 8, 22, 1, 0, 0]])


def line_of(mistake):
    """The line with the mistake's name as a comment, or of the function's call where the mistake is an omission."""
    for function in (norm, attention, port):
        lines, first = inspect.getsourcelines(function)
        for offset, line in enumerate(lines):
            if line.rstrip().endswith(f"# {mistake}"):
                return f"repair/test_diagnosis.py:{first + offset}"
    raise AssertionError(mistake)


def run(reference, parameters, *mistakes, tokens=TOKENS):
    return diagnose(reference, (lambda p, t: port(p, t, frozenset(mistakes)), parameters), (tokens,))


def blamed(defect):
    return {line for operation in defect.candidate for line in operation.lines}


def test_a_correct_port_is_equal(reference, parameters):
    diagnosis = run(reference, parameters)
    assert (diagnosis.verdict, diagnosis.defects, diagnosis.unused_parameters) == ("equal", (), ())
    assert diagnosis.weights.ok
    assert diagnosis.matched[0] > 0.5 * diagnosis.matched[1]


REPAIRS = {
    "gelu": "should be erf gelu",
    "eps": "add: 0.001 → 1e-05",
    "scale": "without mul",
    "axis": "should be softmax over axis 3",
    "heads": "axes 1 and 2 joined in the other order",
    "mask": "concatenate: mask moved by -1 along axis 3",
    "q and k": "split: outputs 1 and 2 in another order",
}


@pytest.mark.parametrize("mistake", REPAIRS)
def test_a_mistake_is_found_at_its_line(mistake, reference, parameters):
    """In every layer that has it, nothing else is blamed for it, and the change that repairs it is named."""
    diagnosis = run(reference, parameters, mistake)
    assert (diagnosis.verdict, diagnosis.reason) == ("different", "")
    for defect in diagnosis.defects:
        assert line_of(mistake) in defect.repair.operation.lines[:2]  # of the line and of its caller
        assert str(defect.repair) == REPAIRS[mistake]
    assert len(diagnosis.defects) == (1 if mistake in ("eps", "mask") else LAYERS)


def test_two_mistakes_are_two_defects_in_order(reference, parameters):
    diagnosis = run(reference, parameters, "eps", "gelu")
    assert diagnosis.verdict == "different"
    assert diagnosis.verified
    lines = [line_of(name) for name in ("gelu", "gelu", "eps")]
    assert len(diagnosis.defects) == len(lines)
    assert all(line in blamed(defect) for line, defect in zip(lines, diagnosis.defects, strict=True))
    assert "aten.gelu" in str(diagnosis.defects[0])


def test_repairs_that_do_not_lead_to_the_outputs_are_not_verified(reference, parameters, monkeypatch):
    """Each is computed from the inputs on, without the values with which the search went on."""
    original = divergence.Change.edits.fget

    def halved(change):
        return tuple(
            (n, lambda sides, edit=edit: {i: v / 2 for i, v in edit(sides).items()}) for n, edit in original(change)
        )

    monkeypatch.setattr(divergence.Change, "edits", property(halved))
    diagnosis = run(reference, parameters, "eps", "gelu")
    assert not diagnosis.verified
    assert all(defect.repair is not None for defect in diagnosis.defects)


def test_a_bias_that_is_left_out_is_found(reference, parameters):
    """It is left out in the second layer only; the parameter is named too, because nothing uses it."""
    diagnosis = run(reference, parameters, "bias")
    (defect,) = diagnosis.defects
    assert line_of("out") in blamed(defect)
    assert diagnosis.unused_parameters == ("layers.1.self_attn.out_proj.bias",)


def test_other_weights_are_no_other_model(reference, parameters):
    other = {**parameters, "head.bias": parameters["head.bias"] + 1, "norm.weight": parameters["norm.weight"][::-1]}
    diagnosis = diagnose(reference, (port, other), (TOKENS,))
    assert diagnosis.verdict == "different"  # the norm's values are the reference's, in another order
    other["head.weight"] = parameters["head.weight"] * 2
    diagnosis = diagnose(reference, (port, other), (TOKENS,))
    repairs = [str(defect.repair) for defect in diagnosis.defects]
    assert repairs == [
        "norm.weight has the values of norm.weight, in another order",
        "head.weight should have the values of head.weight",
        "head.bias should have the values of head.bias",
    ]
    none = {name: np.asarray(array) * 1.5 for name, array in parameters.items()}
    diagnosis = diagnose(reference, (port, none), (TOKENS,))
    assert diagnosis.verdict == "undecided"
    assert "parameters have values that the reference does not have: " in diagnosis.reason


def test_constants_in_float32_are_a_verdict_of_their_own(reference, parameters):
    def rounded(p, tokens):
        return port(p | {"embedding.weight": p["embedding.weight"] * jnp.float32(1 / 3) / (1 / 3)}, tokens)

    diagnosis = diagnose(reference, (rounded, parameters), (TOKENS,))
    assert (diagnosis.verdict, diagnosis.defects) == ("equal but for float32 constants", ())


def test_two_torch_modules_and_two_jax_functions(reference, parameters):
    torch.manual_seed(1)
    twin = Encoder().eval()
    twin.load_state_dict(reference.state_dict())
    assert diagnose(reference, twin, (TOKENS,)).verdict == "equal"
    twin.layers[1].norm2.eps = 1e-2
    (defect,) = diagnose(reference, twin, (TOKENS,)).defects
    assert defect.candidate[0].module == "layers.1.norm2"
    assert diagnose((port, parameters), (port, parameters), (TOKENS,)).verdict == "equal"


def two_norms(p, x, missing=frozenset()):
    """A residual block between two norms."""
    y = norm(x, p, "first")
    y = y @ p["inner.weight"].T
    x = y if "residual" in missing else x + y
    return norm(x, p, "second")


@pytest.mark.parametrize(
    ("wrong", "repair"),
    [
        ("exchanged", "first.weight and first.bias are swapped"),
        ("other values", "inner.weight should have the values of inner.weight"),
        ("residual", "missing: + a value of the reference"),
    ],
)
def test_a_single_mistake_is_repaired(wrong, repair):
    """The parameters of a norm exchanged, weights of another model, and a residual connection that is left out."""
    torch.manual_seed(0)
    blocks = {"first": nn.LayerNorm(5), "inner": nn.Linear(5, 5, bias=False), "second": nn.LayerNorm(5)}
    module = nn.ModuleDict(blocks)
    tensors = {name: torch.randn_like(tensor) for name, tensor in module.named_parameters()}

    def reference(p, x):
        y = nn.functional.layer_norm(x, (5,), p["first.weight"], p["first.bias"])
        return nn.functional.layer_norm(x + y @ p["inner.weight"].T, (5,), p["second.weight"], p["second.bias"])

    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    if wrong == "exchanged":
        arrays |= {"first.weight": arrays["first.bias"], "first.bias": arrays["first.weight"]}
    if wrong == "other values":
        arrays["inner.weight"] = np.random.default_rng(1).standard_normal((5, 5))
    x = np.random.default_rng(0).standard_normal((3, 5))
    diagnosis = diagnose((reference, tensors), (lambda p, x: two_norms(p, x, {wrong}), arrays), (x,))
    assert [str(defect.repair) for defect in diagnosis.defects] == [repair]


def test_a_factor_that_is_left_out_is_found_at_its_line():
    """Neither code has the factor as a number: PyTorch's norm is one operation."""
    tensors = {name: torch.randn(5, generator=torch.Generator().manual_seed(0)) for name in ("weight", "bias")}

    def total(p, x):
        centered = x - x.sum(-1, keepdims=True)
        return centered / jnp.sqrt(jnp.square(x - x.mean(-1, keepdims=True)).mean(-1, keepdims=True) + 1e-5)

    pair = (lambda p, x: nn.functional.layer_norm(x, (5,)) * p["weight"] + p["bias"], tensors)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    port = (lambda p, x: total(p, x) * p["weight"] + p["bias"], arrays)
    (defect,) = diagnose(pair, port, (np.random.default_rng(0).standard_normal((3, 5)),)).defects
    assert str(defect.repair) == "reduce_sum → mean"
    assert defect.lines == (f"repair/test_diagnosis.py:{inspect.getsourcelines(total)[1] + 1}",)


def test_what_fills_a_mask_hides_no_difference():
    """Beside -1e9, scores that differ by their scale are not equal in any bound; the numbers beside them are."""
    scores = np.random.default_rng(0).standard_normal((4, 4))
    filled, other = (np.where(np.tri(4) > 0, array, -1e9) for array in (scores, scores / 2))
    assert not same_order(filled, other, ROUNDED)
    assert same_order(filled, filled + 1e-12, EXACT)


def test_constants_in_float32_everywhere_are_no_difference(reference, parameters):
    """Factors, and attention that PyTorch scales by two square roots: the outputs agree to rounding."""

    def rounded(p, tokens):
        scaled = {name: p[name] * jnp.float32(1 / 3) / (1 / 3) for name in p if name.endswith("in_proj_weight")}
        return port(p | scaled, tokens)

    diagnosis = diagnose(reference, (rounded, parameters), (TOKENS,))
    assert (diagnosis.verdict, diagnosis.defects) == ("equal but for float32 constants", ())


def test_outputs_are_paired_by_name():
    """JAX sorts the keys of a dict; PyTorch keeps their order."""
    weight = torch.randn(3, 3)
    pair = (lambda p, x: {"b": x @ p["w"], "a": x * 2}, {"w": weight})
    port = (lambda p, x: {"a": x * 2, "b": x @ p["w"]}, {"w": jnp.asarray(weight.numpy())})
    x = np.random.default_rng(0).standard_normal((4, 3))
    assert diagnose(pair, port, (x,)).verdict == "equal"


def test_a_last_step_that_is_left_out_is_found():
    """The candidate's output is then a value that the reference has too, on its way."""
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    parameters = {name: tensor.detach() for name, tensor in inner.named_parameters()}
    pair = (lambda p, x: nn.functional.linear(x.tanh(), p["weight"], p["bias"]) + x, parameters)
    arrays = {name: jnp.asarray(tensor.numpy()) for name, tensor in parameters.items()}
    x = np.random.default_rng(0).standard_normal((3, 4))
    diagnosis = diagnose(pair, (lambda p, x: jnp.tanh(x) @ p["weight"].T + p["bias"], arrays), (x,))
    assert (diagnosis.verdict, diagnosis.reason, len(diagnosis.defects)) == ("different", "", 1)
    assert [operation.name for operation in diagnosis.defects[0].reference] == ["aten.add"]


def test_a_module_without_lines_of_its_own_is_named_by_its_path():
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval()
    weights = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in module.named_parameters()}
    port = (lambda p, x: jax.nn.relu(x @ p["0.weight"].T + p["0.bias"]), weights)
    diagnosis = diagnose(module, port, (np.random.default_rng(0).standard_normal((3, 4)),))
    assert "compare/repair/diagnosis.py" not in str(diagnosis)


def test_arrangements_of_outputs():
    """Other axes are named; a square output the wrong way round is another output."""
    weight = torch.randn(3, 4)
    pair = (lambda p, x: (x @ p["w"]).tanh(), {"w": weight})
    weights, x = {"w": jnp.asarray(weight.numpy())}, np.random.default_rng(0).standard_normal((4, 3))
    diagnosis = diagnose(pair, (lambda p, x: jnp.tanh(x @ p["w"]).reshape(2, 2, 4).transpose(2, 0, 1), weights), (x,))
    sentence = "output: shape (4, 2, 2); the reference's is (4, 4)"
    assert (diagnosis.verdict, diagnosis.rearranged) == ("equal", (sentence,))
    assert sentence in str(diagnosis)
    diagnosis = diagnose(pair, (lambda p, x: jnp.tanh(x @ p["w"]).T, weights), (x,))
    assert (diagnosis.verdict, [o.name for o in diagnosis.defects[0].candidate]) == ("different", ["transpose"])


def test_a_wrong_call_is_no_wrong_model():
    pair = (lambda p, x: x * p["w"], {"w": torch.randn(4)})
    port = (lambda p, x: x * p["w"], {"w": jnp.asarray(pair[1]["w"].numpy())})
    x = np.random.default_rng(0).standard_normal((2, 4))
    diagnosis = diagnose(pair, port, (x,), (x + 1,))
    assert (diagnosis.verdict, diagnosis.ok) == ("undecided", False)
    assert diagnosis.reason == "input 0 differs between the candidate and the reference"
    assert (
        diagnose(pair, (lambda p, x: (x * p["w"])[0], port[1]), (x,)).reason == "the outputs have [8] and [4] elements"
    )


def settings():
    return [{}, {"norm_placement": "pre", "activation": "gelu"}, {"positions": "learned", "norm": "rms_norm"}]


@pytest.mark.parametrize("number", range(3))
def test_our_twins_are_equal(number):
    """NNX modules against ours in PyTorch: no false alarm."""
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "param_dtype": "float64", "compute_dtype": "float64"}
    config = TransformerConfig.preset("tiny", **sizes, **settings()[number])
    arrays = random_arrays(config, number)
    model = flax_transformer.Transformer.from_arrays(config, {n: jnp.asarray(a) for n, a in arrays.items()})
    batch = random_batch(config, np.random.default_rng(number), 3, 7, 5)
    diagnosis = diagnose(convert.to_torch(model).eval(), model, (batch.src_tokens, batch.tgt_tokens))
    assert (diagnosis.verdict, diagnosis.defects) == ("equal", ())


@pytest.mark.parametrize("name", ["annotated_transformer", "jadore801120"])
def test_a_published_module_and_our_flax_model_are_equal(name):
    """The published code was written by others, with masks of its own."""
    module = published.random_model(name, as_published=True, layers=1).eval()
    checkpoint = published.checkpoint_of(name, module, as_published=True)
    batch = random_batch(checkpoint.config, np.random.default_rng(1), 3, published.LENGTH, published.LENGTH)
    call = published.ORACLES[name].call

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, src, tgt):
            return call(self.module, src, tgt, checkpoint.config.pad_id)

    diagnosis = diagnose(Called().eval(), checkpoint.to_flax(), (batch.src_tokens, batch.tgt_tokens))
    assert (diagnosis.verdict, diagnosis.defects) == ("equal", ())


@pytest.mark.parametrize("factor", [3, 4])
def test_a_whole_number_of_the_reference_is_the_repair(factor):
    """3 y - y and 4 y / sqrt(4) are 2 y too."""

    def reference(p, x):
        return torch.tanh(x @ p["w"]) * 2

    def candidate(p, x):
        return jnp.tanh(x @ p["w"]) * factor

    w = np.random.default_rng(0).standard_normal((3, 5))
    inputs = (np.random.default_rng(1).standard_normal((4, 3)),)
    (defect,) = diagnose((reference, {"w": torch.from_numpy(w)}), (candidate, {"w": w}), inputs).defects
    assert str(defect.repair) == f"mul: {factor} → 2"


def test_a_value_that_was_replaced_stays_when_an_earlier_one_is():
    """Otherwise the diagnosis would find two defects by turns without end."""

    def model(p, x):
        first = x * p["w"]
        return jnp.tanh(first) * 2, first

    trace = capture((model, {"w": np.ones(6)}), (np.arange(6.0),))
    side, first, last = Side(trace), trace.outputs["1"], trace.outputs["0"]
    side = side.changed(side.replay({last: np.arange(6.0)}), (last,))
    side = side.changed(side.replay({first: -np.arange(6.0)}), (first,))
    assert np.array_equal(side.value(last), np.arange(6.0))
    assert np.array_equal(side.value(first), -np.arange(6.0))
