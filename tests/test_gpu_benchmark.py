"""The GPU benchmark at tiny sizes: its FLOPs, its reading of a trace, and its place in the page."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from benchmarks import gpu
from benchmarks.gpu import utilization
from benchmarks.pages import marks
from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.model import Transformer
from twinax.parity.functions import random_arrays
from twinax.train.losses import cross_entropy
from twinax.train.planning.flops import model_flops

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


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
    assert utilization(98.9e12, "NVIDIA H200") == "10.0%"
    assert utilization(1e12, "cpu") == "unknown peak"


def test_training_and_its_largest_operations():
    scale = gpu.SCALES["small"]
    rows = gpu.operations(scale, "fused")
    shares = [float(share.removesuffix("%")) for _, share in rows]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5
    assert any("dot" in name or "fusion" in name for name, _ in rows)


def test_a_cpu_does_not_reach_the_page():
    marks(PAGE, "gpu")
    with pytest.raises(SystemExit, match=r"^JAX sees no GPU or TPU here; `python -m benchmarks.gpu --small`"):
        gpu.refuse_cpu(gpu.device(gpu.SCALES["small"]))
