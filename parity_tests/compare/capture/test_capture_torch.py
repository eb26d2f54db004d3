"""Traces of PyTorch modules and functions, against the modules' own results in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from parity_tests.compare.capture.test_recording import assert_stored
from twinax.compare.capture.torch_trace import capture_torch
from twinax.compare.capture.trace import CaptureError

LINE = __file__.rpartition("/")[2]


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


class Tagger(nn.Module):
    """Indexing, a buffer, memory written in place, a cast to float32, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2))
        self.register_buffer("table", torch.arange(12.0).reshape(2, 6) / 7)
        self.unused = nn.Parameter(torch.ones(2))
        self.alias = self.blocks[0]

    def forward(self, tokens):
        x = self.embedding(tokens)
        x[:, 0] += self.table[0]
        flat = x.view(-1, 6)
        flat.mul_(2)
        x = x.masked_fill(tokens[..., None] == 0, 0).float()
        for block in self.blocks:
            x = x + block(x)
        return {"hidden": x, "scores": (x.sum(-1), x.amax((1, 2)))}


MODULES = {
    "encoder and decoder": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        (rows(0, 2, 5, 8), rows(1, 2, 4, 8)),
    ),
    "encoder in inference": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (rows(0, 2, 5, 8),),
    ),
    "recurrent": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True), (rows(0, 5, 2, 3),)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        (rows(0, 2, 2, 6, 6),),
    ),
    "written in place": (Tagger, (np.array([[1, 2, 3], [4, 0, 0]]),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    """Every output is the module's in float64; the module, PyTorch's settings and hooks stay as they were."""
    build, inputs = MODULES[name]
    torch.manual_seed(0)
    module = build().eval()
    state = copy.deepcopy(module.state_dict())
    before = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled(), len(hooks._global_forward_hooks)
    trace = capture_torch(module, tuple(a.astype(np.float32) if a.dtype.kind == "f" else a for a in inputs))
    after = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled(), len(hooks._global_forward_hooks)
    assert before == after
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(state.values(), module.state_dict().values(), strict=True)
    )
    wide = copy.deepcopy(module).double()
    narrow = [
        torch.from_numpy(a.astype(np.float32)).double() if a.dtype.kind == "f" else torch.from_numpy(a) for a in inputs
    ]
    if name == "written in place":  # its own cast would round
        wide.forward = lambda tokens: with_wide_casts(Tagger.forward, wide, tokens)
    with torch.no_grad():
        outputs = wide(*narrow)
    expected = [t for t in torch.utils._pytree.tree_leaves(outputs) if torch.is_tensor(t)]
    assert len(trace.outputs) == len(expected)
    for number, tensor in zip(trace.outputs.values(), expected, strict=True):
        np.testing.assert_allclose(trace.values[number], tensor.numpy(), rtol=1e-12, atol=1e-14)
    for number, value in trace.replay({n: trace.values[n] for n in trace.parameters.values()}).items():
        np.testing.assert_allclose(value, trace.values[number], rtol=1e-12, atol=1e-14)
    assert_stored(trace)


def with_wide_casts(function, *arguments):
    original = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        return function(*arguments)
    finally:
        torch.Tensor.float = original


def test_paths_lines_and_what_no_output_needs():
    trace = capture_torch(Tagger().eval(), (np.array([[1, 2, 3]]),))
    assert list(trace.outputs) == ["hidden", "scores.0", "scores.1"]
    assert list(trace.inputs) == ["0"]
    assert trace.unused_parameters() == ["unused"]
    assert trace.parameters["alias.0.weight"] == trace.parameters["blocks.0.0.weight"]
    gelus = [operation for operation in trace.operations if operation.name == "aten.gelu"]
    first = Tagger.forward.__code__.co_firstlineno
    assert [g.line for g in gelus] == [f"capture/{LINE}:{first + 7}"] * 2
    assert [g.module.rpartition(".")[0] for g in gelus] == ["blocks.0", "blocks.1"]


def test_attention_is_taken_apart():
    """The weights are a value of their own, with the mask."""
    q, k, v = (torch.from_numpy(rows(i, 1, 2, 3, 4)) for i in range(3))
    trace = capture_torch((lambda p, *a: functional.scaled_dot_product_attention(*a, is_causal=True), {}), (q, k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(4)).masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf)
    weights = scores.softmax(-1).numpy()
    assert any(value.shape == weights.shape and np.allclose(value, weights, atol=1e-14) for value in trace.values)


def test_memory_that_is_not_written_to_is_zero():
    """Else two traces of one model would differ."""

    def model(p, x):
        scratch = torch.full((4096,), 7.0)
        del scratch
        empty = (torch.empty(4096), torch.empty_like(x), x.new_empty(4096), torch.empty_strided((4096,), (1,)))
        return x + 0 * sum(part.nan_to_num(0) for part in empty)

    trace = capture_torch((model, {}), (np.ones(4096),))
    made = [o for o in trace.operations if "empty" in o.name]
    assert len(made) == 4
    assert not any(trace.values[n].any() for o in made for n in o.outputs)


def function(parameters, x):
    hidden = x @ parameters["w"]
    view = hidden[0]
    view.add_(1)
    return hidden * parameters["more"][0]


def test_a_function_with_memory_that_is_written_through_a_view():
    parameters = {"w": torch.from_numpy(rows(0, 3, 4)).float(), "more": [torch.ones(4)]}
    x = rows(1, 2, 3)
    trace = capture_torch((function, parameters), (x,))
    expected = x @ parameters["w"].double().numpy()
    expected[0] += 1
    np.testing.assert_allclose(trace.values[trace.outputs["output"]], expected, atol=1e-14)
    assert list(trace.parameters) == ["w", "more.0"]
    assert "written in place" in {operation.name for operation in trace.operations}
    assert trace.unused_parameters() == []


def test_replay_continues_with_changed_values():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), rows(0, 5, 3)
    trace = capture_torch(module, (x,))
    (number,) = next(o.outputs for o in trace.operations if o.name == "aten.addmm")
    changed = trace.replay({number: np.full((5, 4), 0.3)})
    expected = module.double()[1:](torch.full((5, 4), 0.3, dtype=torch.float64)).detach().numpy()
    np.testing.assert_allclose(changed[trace.outputs["output"]], expected, atol=1e-14)
    changed = trace.replay({trace.parameters["2.weight"]: np.zeros((2, 4)), trace.parameters["2.bias"]: np.ones(2)})
    assert (changed[trace.outputs["output"]] == 1).all()


def test_replay_follows_what_is_written_in_place():
    """Through views of the same memory, several times."""

    def function(parameters, x):
        table = torch.zeros(4, 3)
        first, rest = table[0], table.view(-1)[3:]
        table[1] = x * parameters["w"]
        first += table[1]
        table[:, 2].mul_(2)
        return table * 1, first * 3, rest * 5

    weight, x = torch.randn(3), rows(0, 3)
    trace = capture_torch((function, {"w": weight}), (x,))
    changed = trace.replay({trace.parameters["w"]: np.ones(3)})
    torch.set_default_dtype(torch.float64)
    expected = function({"w": torch.ones(3)}, torch.from_numpy(x))
    torch.set_default_dtype(torch.float32)
    for name, tensor in zip(("0", "1", "2"), expected, strict=True):
        np.testing.assert_allclose(changed[trace.outputs[name]], tensor.numpy(), atol=1e-14)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Inference(nn.Module):
    @torch.inference_mode()
    def forward(self, x):
        return (x + 1) * 2


class Uncopied(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


REFUSED = [
    (nn.Dropout(0.1), r"^Dropout: is in training mode; call eval\(\) on the module, or compare the dropout too$"),
    (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"^1: is in training mode"),
    (Noise(), rf"^capture/{LINE}:\d+: aten.randn_like draws random numbers; call eval\(\)"),
    (
        Inference(),
        rf"^capture/{LINE}:\d+: torch.inference_mode hides in-place writes; use torch.no_grad$",
    ),
    (Uncopied(), r"^Uncopied: cannot be copied: no copies$"),
    (nn.Linear(3, 3), r"^Linear: the forward pass in float64 failed: RuntimeError: mat1 and mat2 shapes"),
    (3, r"^int: is not a model; return a torch module"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED)
def test_what_cannot_be_traced(model, message):
    with pytest.raises(CaptureError, match=message) as error:
        capture_torch(model, (rows(0, 2, 2),))
    assert "\n" not in str(error.value)
    assert torch.get_default_dtype() == torch.float32


def test_dropout_of_rate_0_in_training_mode_changes_nothing():
    assert capture_torch(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)).train(), (rows(0, 1, 2),)).operations


class Attribute(nn.Module):
    """Its table is neither a parameter nor a buffer, so the module's `double` does not reach it."""

    def __init__(self, dtype):
        super().__init__()
        self.linear, self.table = nn.Linear(3, 4), torch.randn(4, 5, dtype=dtype)

    def forward(self, x):
        return self.linear(x) @ self.table + self.table.sum(0, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tensor_that_is_only_an_attribute_is_computed_in_float64(dtype):
    module = Attribute(dtype).eval()
    x = torch.randn(2, 3)
    trace = capture_torch(module, (x,), {"output": np.ones((2, 5))})
    wide = copy.deepcopy(module).double()
    wide.table = wide.table.double()
    output = wide(x.double())
    output.sum().backward()
    np.testing.assert_allclose(trace.values[trace.outputs["output"]], output.detach(), rtol=1e-13)
    for name, parameter in wide.named_parameters():
        np.testing.assert_allclose(trace.values[trace.gradients[name]], parameter.grad, rtol=1e-12)


class Written(nn.Module):
    """Its memory is an attribute, written through a slice and through another attribute that is a view of it."""

    def __init__(self, dtype):
        super().__init__()
        self.linear, self.memory = nn.Linear(3, 4), torch.zeros(2, 4, dtype=dtype)
        self.last = self.memory.view(-1)[6:]

    def forward(self, x):
        self.memory[:1] = self.linear(x)
        self.last.add_(1.5)
        return self.memory.clone().sin()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_is_written_through_a_view_of_an_attribute_stays(dtype):
    module, x = Written(dtype).eval(), torch.randn(1, 3)
    trace = capture_torch(module, (x,))
    with torch.no_grad():
        first = copy.deepcopy(module.linear).double()(x.double()).sin()
    expected = torch.cat([first, torch.tensor([[0, 0, math.sin(1.5), math.sin(1.5)]], dtype=torch.float64)])
    np.testing.assert_allclose(trace.values[trace.outputs["output"]], expected, rtol=1e-13)
    assert not module.memory.any()


@pytest.mark.parametrize(("fresh", "bound"), [(True, 1e-13), (False, 1e-6)])
def test_what_is_written_through_a_view_of_other_memory_stays(fresh, bound):
    """Memory that exists before keeps its dtype, so what is written to it is rounded."""
    zeros = np.zeros((2, 4), np.float32)
    existing = torch.from_numpy(zeros)

    def function(p, x):
        memory = torch.from_numpy(zeros.copy()) if fresh else existing
        memory[:1] = x @ p["w"]
        return memory + 1

    x, w = rows(0, 1, 3), rows(1, 3, 4)
    trace = capture_torch((function, {"w": torch.tensor(w)}), (torch.tensor(x),))
    expected = np.concatenate([x @ w, np.zeros((1, 4))]) + 1
    np.testing.assert_allclose(trace.values[trace.outputs["output"]], expected, rtol=bound)
