"""The GPU benchmark at tiny sizes: its FLOPs, its reading of a trace, its budget, and its place in the page."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.profile import operations
from benchmarks.gpu.scale import SCALES
from benchmarks.gpu.training import utilization
from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.model import Transformer
from twinax.parity.functions import random_arrays
from twinax.planning.flops import model_flops
from twinax.train.step.losses import cross_entropy

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.newest


def product_flops(jaxpr):
    """FLOPs of the matrix products in a traced program, from their shapes; a last branch is the default platform's."""
    total = 0
    for equation in jaxpr.eqns:
        for value in (*equation.params.values(), *equation.params.get("branches", ())[-1:]):
            if isinstance(value, ClosedJaxpr):
                total += product_flops(value.jaxpr)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * int(equation.outvars[0].aval.size * summed)
    return total


@pytest.mark.parametrize(("preset", "ffn_gate"), [("base", False), ("small", True)])
def test_flops_are_those_of_the_traced_products(preset, ffn_gate):
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 3, "src_vocab_size": 41, "tgt_vocab_size": 41}
    config = TransformerConfig.preset(preset, **sizes, d_model=16, num_heads=2, d_ff=24, ffn_gate=ffn_gate)
    src, tgt = jnp.ones((5, 7), int), jnp.ones((5, 9), int)

    def loss(arrays):
        logits = Transformer.from_arrays(config, arrays)(src, tgt)
        return cross_entropy(logits, tgt, config.pad_id, TrainingConfig())[0]

    program = jax.make_jaxpr(jax.grad(loss))(random_arrays(config, 0))
    assert product_flops(program.jaxpr) == model_flops(config, 5, 7, 9)


def test_utilization_needs_a_known_peak():
    assert utilization(98.9e12, "bfloat16", "NVIDIA H200") == "10.0%"
    assert utilization(98.9e12, "float32", "NVIDIA H200") == "20.0%"
    assert utilization(1e12, "bfloat16", "cpu") == "unknown peak"


def test_the_largest_operations_of_a_training():
    *rows, (_, _, _, everything) = operations(SCALES["small"])
    shares = [float(share.removesuffix("%")) for *_, share in rows]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5
    assert everything == "100%"
    assert any("dot" in name or "fusion" in name for name, *_ in rows)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """f(arguments) -> (names of the parts that were measured, the page), with a device and parts that take no time."""
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu -->\n<!-- end of gpu -->\n")
    measured = []

    class Process:
        def __init__(self, part, scale):
            measured.append(part.name)
            row = ["gpu", "NVIDIA H200", "1.2", "cuda"] if part.name == "device" else [f"figure of {part.name}"]
            self.rows = [row]

        def has_ended(self):
            return True

        def result(self):
            return {"rows": self.rows, "seconds": 1}

    monkeypatch.setattr(command, "Process", Process)

    def call(*parts, budget=None):
        measured.clear()
        command.main(Namespace(budget=budget, small=False, page=page, parts=list(parts)))
        return measured[1:], page.read_text()

    return call


def test_parts_beyond_the_budget_are_left_to_the_next_call(run):
    names = [part.name for part in command.PARTS]
    at_once = [part.name for part in command.PARTS if part.seconds <= 100]
    measured, page = run(budget=110)
    assert measured == at_once
    assert page.count("(skipped: the budget was used up)") == len(names) - len(at_once) > 0
    assert all(f"figure of {name}" in page for name in at_once)
    measured, page = run()
    assert measured == [name for name in names if name not in at_once]
    assert "Not measured" not in page
    assert all(f"figure of {name}" in page for name in names)
    assert run() == ([], page)
    assert run("base")[0] == ["base"]


def test_a_cpu_does_not_reach_the_page(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    monkeypatch.setattr(command, "results", lambda *_: [(None, {"rows": [["cpu", "cpu", "", ""]]})])
    with pytest.raises(SystemExit, match=r"^JAX sees no GPU or TPU here; `python -m benchmarks.gpu --small`"):
        command.main(Namespace(budget=None, small=False, page=page, parts=[]))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_part_is_printed_at_tiny_sizes():
    program = [sys.executable, "-m", "benchmarks.gpu", "--small", "--budget", "600"]
    output = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert all(part.title in output for part in command.PARTS)
    assert "Not measured" not in output
    assert "NO" not in output.split()
