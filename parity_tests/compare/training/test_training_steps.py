"""Training steps as one program: loss, gradients and optimizer; in PyTorch `backward` and a torch optimizer."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.training.train_state import TrainState
from torch import nn
from torch.nn import functional

from twinax.compare.capture.torch_trace import capture_torch
from twinax.compare.comparison import compare

RATE, DECAY = 1e-2, 0.1
RANDOM = np.random.default_rng(0)
SHAPES = {"w": (6, 9), "b": (9,), "v": (9, 4), "c": (4,)}
ARRAYS = {name: RANDOM.standard_normal(shape) for name, shape in SHAPES.items()}
TENSORS = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
INPUTS = RANDOM.standard_normal((8, 6)), RANDOM.integers(0, 4, 8)


def loss_of(p, x, y):
    return functional.cross_entropy(functional.gelu(x @ p["w"] + p["b"]) @ p["v"] + p["c"], y)  # reference


def adamw(p, x, y):
    optimizer = torch.optim.AdamW(p.values(), lr=RATE, weight_decay=DECAY)
    loss = loss_of(p, x, y)
    loss.backward()
    optimizer.step()
    return {"loss": loss, **p}


def momentum(p, x, y):
    optimizer = torch.optim.SGD(p.values(), lr=RATE, momentum=0.9, weight_decay=DECAY)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(p, x, y)
        loss.backward()
        optimizer.step()
    return {"loss": loss, **p}


def by_hand(p, x, y):
    loss = loss_of(p, x, y)
    gradients = torch.autograd.grad(loss, [*p.values()])
    with torch.no_grad():
        new = {name: a - RATE * gradient for (name, a), gradient in zip(p.items(), gradients, strict=True)}
    return {"loss": loss, **new}


def functional_gradients(p, x, y):
    gradients, loss = torch.func.grad_and_value(loss_of)(p, x, y)
    return {"loss": loss, **{name: a - RATE * gradients[name] for name, a in p.items()}}


def port_of_loss(p, x, y, mistakes=()):
    hidden = jax.nn.gelu(x @ p["w"] + p["b"], approximate="gelu" in mistakes)  # gelu
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ p["v"] + p["c"], y)
    return losses.sum() if "sum" in mistakes else losses.mean()  # sum


def sgd_port(*mistakes):
    def run(p, x, y):
        loss, gradients = jax.value_and_grad(port_of_loss)(p, x, y, mistakes)
        return {"loss": loss, **jax.tree.map(lambda a, g: a - RATE * g, p, gradients)}

    return run


def momentum_port(p, x, y):
    optimizer = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, momentum=0.9))
    state = optimizer.init(p)
    for _ in range(2):
        loss, gradients = jax.value_and_grad(port_of_loss)(p, x, y)
        updates, state = optimizer.update(gradients, state, p)
        p = optax.apply_updates(p, updates)
    return {"loss": loss, **p}


def adamw_port(*mistakes):
    def run(p, x, y):
        loss, gradients = jax.value_and_grad(port_of_loss)(p, x, y, mistakes)
        optimizer = optax.adamw(RATE) if "decay" in mistakes else optax.adamw(RATE, weight_decay=DECAY)
        updates, _ = optimizer.update(gradients, optimizer.init(p), p)  # decay
        return {"loss": loss, **optax.apply_updates(p, updates)}

    return run


def adamw_by_hand(*mistakes):
    def run(p, x, y):
        loss, gradients = jax.value_and_grad(port_of_loss)(p, x, y)

        def new(a, g):
            g = g + DECAY * a if "coupled" in mistakes else g  # coupled
            m, v = 0.1 * g, 0.001 * g * g
            m, v = (m, v) if "bias" in mistakes else (m / 0.1, v / 0.001)
            root = jnp.sqrt(v + 1e-8) if "epsilon" in mistakes else jnp.sqrt(v) + 1e-8  # bias
            update = m / root if "coupled" in mistakes else m / root + DECAY * a
            return a - RATE * update

        return {"loss": loss, **jax.tree.map(new, p, gradients)}

    return run


def line_of(comment):
    source, first = inspect.getsourcelines(inspect.getmodule(line_of))
    (number,) = (i for i, line in enumerate(source, max(first, 1)) if comment in line.partition("  # ")[2])
    return f"training/test_training_steps.py:{number}"


def compared(reference, candidate, **settings):
    return compare((reference, TENSORS), (candidate, ARRAYS), INPUTS, **settings)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (by_hand, sgd_port()),
        (functional_gradients, sgd_port()),
        (momentum, momentum_port),
        (adamw, adamw_port()),
        (adamw, adamw_by_hand()),
    ],
)
def test_a_correct_port_of_a_step_is_equal(reference, candidate):
    comparison = compared(reference, candidate)
    assert comparison.verdict == "equal", str(comparison)
    assert not comparison.rounding
    before = capture_torch((reference, TENSORS), INPUTS)
    assert not any(np.array_equal(before.values[before.outputs[name]], ARRAYS[name]) for name in ARRAYS)


def test_the_operations_of_the_backward_pass_have_the_lines_of_the_forward_pass():
    trace = capture_torch((adamw, TENSORS), INPUTS)
    assert all(operation.line for operation in trace.operations)
    (backward,) = (operation for operation in trace.operations if operation.name == "aten.gelu_backward")
    assert backward.line == line_of("reference")
    assert not trace.derived.isdisjoint(backward.outputs)


@pytest.mark.parametrize(
    ("reference", "candidate", "comment", "repair"),
    [
        (by_hand, sgd_port("sum"), "sum", "reduce_sum → mean"),
        (adamw, adamw_port("gelu"), "gelu", "should be erf gelu"),
        pytest.param(adamw, adamw_port("decay"), "decay", "mul: 0.0001 → 0.1", marks=pytest.mark.slow),
        pytest.param(adamw, adamw_by_hand("bias"), "bias", "missing: / 0.0316227766", marks=pytest.mark.slow),
        pytest.param(adamw, adamw_by_hand("coupled"), "coupled", "", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_a_step_is_named_first(reference, candidate, comment, repair):
    first = compared(reference, candidate).forward.defects[0]
    assert first.lines[0] == line_of(comment)
    assert not repair or str(first.repair) == repair


@pytest.mark.slow
def test_an_epsilon_within_the_root_is_a_difference():
    """Its effect is 1e-8 of small gradients."""
    comparison = compared(adamw, adamw_by_hand("epsilon"))
    lines = {line for defect in comparison.forward.defects for line in defect.lines}
    assert comparison.verdict == "different"
    assert line_of("bias") in lines


def test_mistakes_in_the_forward_pass_the_loss_and_the_optimizer_are_all_named():
    comparison = compared(adamw, adamw_port("gelu", "decay"))
    assert [*dict.fromkeys(defect.lines[0] for defect in comparison.forward.defects)] == [
        line_of("gelu"),
        line_of("decay"),
    ]
    assert {str(defect.repair) for defect in comparison.forward.defects} == {"should be erf gelu", "mul: 0.0001 → 0.1"}
    assert comparison.forward.verified


class Step(nn.Module):
    """A module that trains itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4))

    def forward(self, x, y):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=DECAY)
        loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        optimizer.step()
        return loss


def train_state(p, x, y):
    """Parameters have other names, and other axes, and are within a state."""
    names = {"w": "model.0.weight", "b": "model.0.bias", "v": "model.2.weight", "c": "model.2.bias"}
    params = {own: p[name].T for own, name in names.items()}
    state = TrainState.create(apply_fn=port_of_loss, params=params, tx=optax.adamw(RATE, weight_decay=DECAY))
    loss, gradients = jax.value_and_grad(port_of_loss)(state.params, x, y)
    return loss, state.apply_gradients(grads=gradients)


def test_parameters_that_a_module_updates_are_outputs():
    step = Step()
    arrays = {name: tensor.detach().numpy() for name, tensor in step.named_parameters()}
    comparison = compare(step, (train_state, arrays), INPUTS, gradients=True)
    assert comparison.forward.verdict == "equal", str(comparison)
    assert len(comparison.traces[0].outputs) == 5
    assert comparison.verdict == "gradients undecided"
    assert "create_graph" in comparison.backward.reason
    assert any("rounding" in gap for gap in comparison.coverage_gaps)
