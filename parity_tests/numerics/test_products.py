"""Products with weights: their values and gradients against float64, and the program that computes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer import DropoutKey, Transformer
from twinax.flax_transformer.module import named_arrays
from twinax.flax_transformer.xla_cpu.products import add_bias, product, scale
from twinax.parity.functions import random_arrays, random_batch
from twinax.train.step.losses import cross_entropy

HALF_ULPS = {
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
}  # relative to the number
# XLA chooses another implementation where an axis has the length 1, and where all are short.
SHAPES = [(1, 1, 1, 1), (1, 1, 16, 9), (1, 7, 1, 3), (3, 1, 5, 16), (2, 3, 7, 1), (2, 3, 4, 5), (8, 16, 24, 40)]
EQUATIONS = {"BLI,IO->BLO": "IO", "BLI,OI->BLO": "OI"}  # a kernel, a tied embedding


def assert_rounded(result: jax.Array, dtype: str, equation: str, *arrays: np.ndarray) -> None:
    """The result is within half an ulp of the exact one, plus the rounding of sums, in float32 or wider."""
    expected = np.einsum(equation, *arrays)
    magnitude = np.einsum(equation, *(np.abs(array) for array in arrays))
    bound = HALF_ULPS[dtype] * np.abs(expected) + 16 * min(HALF_ULPS[dtype], 2.0**-24) * magnitude
    assert result.dtype == dtype
    assert (np.abs(np.asarray(result, np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", HALF_ULPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_their_gradients_are_rounded_once(equation: str, dtype: str, shape: tuple[int, ...]) -> None:
    sizes = dict(zip("BLIO", shape, strict=True))

    def outputs(
        x: jax.Array, weights: jax.Array, bias: jax.Array, factors: jax.Array, gradient: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, ...]:
        y, backward = jax.vjp(lambda *args: product(equation, *args), x, weights)
        scaled, of_scaled = jax.vjp(scale, rows, factors)
        return y, *backward(gradient), jax.vjp(add_bias, y, bias)[1](gradient)[1], scaled, *of_scaled(gradient)

    compiled = jax.jit(outputs)

    @given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-12, 12))
    def check(seed: int, exponent: int) -> None:
        rng = np.random.default_rng(seed)
        letters = ("BLI", EQUATIONS[equation], "O", "O", "BLO", "BLO")
        arrays = [rng.normal(size=[sizes[a] for a in name]) * 2.0**exponent for name in letters]
        narrow = [jnp.asarray(array, dtype) for array in arrays]
        x, weights, _, factors, gradient, rows = (np.asarray(array, np.float64) for array in narrow)
        y, of_x, of_weights, of_bias, scaled, *of_scaled = compiled(*narrow)
        assert_rounded(y, dtype, equation, x, weights)
        assert_rounded(of_x, dtype, f"BLO,{EQUATIONS[equation]}->BLI", gradient, weights)
        assert_rounded(of_weights, dtype, f"BLI,BLO->{EQUATIONS[equation]}", x, gradient)
        assert_rounded(of_bias, dtype, "BLO->O", gradient)
        assert_rounded(scaled, dtype, "BLO,O->BLO", rows, factors)
        assert_rounded(of_scaled[0], dtype, "BLO,O->BLO", gradient, factors)
        if dtype != "bfloat16":  # whose terms are rounded too
            assert_rounded(of_scaled[1], dtype, "BLO,BLO->O", gradient, rows)

    check()


def test_the_program_of_a_cpu_multiplies_bfloat16() -> None:
    """No float32 copy of an operand: XLA would make one of weights (11, 24) if it did not use the instructions."""
    x, weights, gradient = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 13, 11), (11, 24), (4, 13, 24)))

    def of_x(x: jax.Array, weights: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, backward = jax.vjp(lambda x: product("BLI,IO->BLO", x, weights), x)
        return y, *backward(gradient)

    assert jax.default_backend() == "cpu"
    text = jax.jit(of_x).lower(x, weights, gradient).compile().as_text()
    assert text is not None
    assert "f32[11,24]" not in text
    assert "bf16[11,24]" in text


@pytest.mark.parametrize(("platform", "wide"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_only_the_program_of_a_cpu_returns_float32(platform: str, wide: bool) -> None:
    arrays = [jnp.ones(shape, jnp.bfloat16) for shape in ((4, 13, 11), (11, 24), (24,), (4, 13, 24))]

    def gradients(x: jax.Array, weights: jax.Array, bias: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *args: add_bias(product("BLI,IO->BLO", *args[:2]), args[2]), x, weights, bias)[1](
            gradient
        )

    text = jax.jit(gradients).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == (3 if wide else 2)  # on a CPU, the gradient of the bias too
    assert all(("xf32>" in line.rpartition("->")[2]) == wide for line in products)


@pytest.mark.parametrize(("platform", "barriers"), [("cpu", 2), ("cuda", 0), ("tpu", 0)])
@pytest.mark.parametrize("dtype", HALF_ULPS)
def test_only_the_program_of_a_cpu_transposes_for_the_gradients(platform: str, barriers: int, dtype: str) -> None:
    """The narrower side is transposed, here that of the outputs, and the result back; in bfloat16 nothing is."""
    arrays = [jnp.ones(shape, dtype) for shape in ((4, 13, 24), (24, 11), (4, 13, 11))]

    def of_weights(x: jax.Array, weights: jax.Array, gradient: jax.Array) -> jax.Array:
        return jax.vjp(lambda weights: product("BLI,IO->BLO", x, weights), weights)[1](gradient)[0]

    text = jax.jit(of_weights).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.optimization_barrier") == (0 if dtype == "bfloat16" else barriers)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_second_derivatives_are_those_of_einsum(equation: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 3, 4), (5, 4) if equation.endswith(",OI->BLO") else (4, 5), (5,), (5,)
    x, *params = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)

    def loss(weights: jax.Array, bias: jax.Array, factors: jax.Array) -> jax.Array:
        return jnp.sin(scale(add_bias(product(equation, x, weights), bias), factors)).sum()

    def expected_loss(weights: jax.Array, bias: jax.Array, factors: jax.Array) -> jax.Array:
        return jnp.sin((jnp.einsum(equation, x, weights) + bias) * factors).sum()

    tangents = [jnp.cos(param) for param in params]
    for derivative in (
        lambda f: jax.jvp(jax.grad(f, (0, 1, 2)), params, tangents)[1],
        lambda f: jax.jacrev(jax.grad(f))(*params),
    ):
        for actual, expected in zip(derivative(loss), derivative(expected_loss), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_a_bias_in_a_wider_dtype_widens_the_sum() -> None:
    x, bias = jnp.ones((2, 3, 4), jnp.float32), jnp.ones(4, jnp.float64)
    for function in (add_bias, scale):
        y, backward = jax.vjp(function, x, bias)
        assert [array.dtype.name for array in (y, *backward(y))] == ["float64", "float32", "float64"]


@pytest.mark.parametrize(("lengths", "tied"), [((1, 1, 1), True), ((1, 9, 2), False), ((3, 1, 7), True)], ids=str)
def test_a_model_trains_in_bfloat16(lengths: tuple[int, int, int], tied: bool) -> None:
    """XLA rejects some products of bfloat16 arrays only when they run, by their shapes and by the program around."""
    config = TransformerConfig(
        src_vocab_size=37, tgt_vocab_size=37, d_model=14, num_heads=7, d_ff=24, num_encoder_layers=1,
        num_decoder_layers=1, shared_embeddings=tied, tied_output=tied, residual_dropout=0.1, compute_dtype="bfloat16",
    )  # fmt: skip
    model = Transformer.from_arrays(config, {n: jnp.asarray(a) for n, a in random_arrays(config, 0).items()})
    batch = random_batch(config, np.random.default_rng(0), *lengths)
    src, tgt = jnp.asarray(batch.src_tokens), jnp.asarray(batch.tgt_tokens)

    def loss(arrays: Any) -> jax.Array:
        key = DropoutKey(0, 0, jnp.arange(len(src)))
        logits = Transformer.from_arrays(config, arrays)(src, tgt, dropout_key=key)
        return cross_entropy(logits, jnp.maximum(tgt, 1), config.pad_id, TrainingConfig())[0]

    for array in jax.jit(jax.grad(loss))(named_arrays(model)).values():
        assert np.isfinite(np.asarray(array, np.float64)).all()
