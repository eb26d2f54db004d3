"""Products of 8-bit integers: against torch's quantization, integer arithmetic and the error that rounding allows."""

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinax import TransformerConfig
from twinax.configs.decoding import DecodingConfig
from twinax.flax_transformer import Transformer, generate, score
from twinax.flax_transformer.module import named_arrays
from twinax.flax_transformer.quantization import Quantized, quantize_matrix, quantized_product
from twinax.flax_transformer.xla_cpu import integer_products
from twinax.parity.functions import random_arrays, random_batch

pytestmark = pytest.mark.newest

EQUATIONS = {"BLI,IO->BLO": (0, "IO"), "BLI,OI->BLO": (1, "OI")}  # a kernel, a tied embedding
SIZES = {"B": 2, "L": 3, "I": 19, "O": 24}
SEEDS = st.integers(0, 2**32 - 1)


def draw(seed: int, letters: str, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(3, [SIZES[a] for a in letters]) * scale).astype(np.float32)


@pytest.mark.parametrize("equation", EQUATIONS)
@given(seed=SEEDS, exponent=st.integers(-10, 10))
def test_a_matrix_is_rounded_as_torch_does(equation: str, seed: int, exponent: int) -> None:
    inputs, letters = EQUATIONS[equation]
    weights = draw(seed, letters, 2.0**exponent)
    weights[tuple(slice(None) if axis == inputs else 0 for axis in range(2))] = 0  # an output without weights
    with jax.enable_x64(False):
        values, scales, _ = map(np.asarray, quantize_matrix(jnp.asarray(weights), inputs))
    np.testing.assert_allclose(scales, np.abs(weights).max(inputs) / 127, rtol=2.0**-22)
    step = np.expand_dims(scales, inputs)
    positive = torch.from_numpy(np.where(scales > 0, scales, 1))
    expected = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(weights), positive, torch.zeros(SIZES["O"]), 1 - inputs, -127, 127
    )
    # One step more or less where torch, which multiplies by 1 / scale, rounds another way.
    difference = np.abs(values * step - expected.numpy())
    assert (difference <= 1.0001 * step).all()
    assert (difference > 0.5 * step).mean() < 0.01
    assert (np.abs(values * step - weights) <= 0.5001 * step).all()


@pytest.mark.parametrize("equation", EQUATIONS)
@given(seed=SEEDS, dtype=st.sampled_from(["float32", "bfloat16"]))
def test_a_product_differs_by_the_rounding_of_its_operands(equation: str, seed: int, dtype: str) -> None:
    """|x w - x' w'| <= |x| |w - w'| + |x - x'| |w'|, with half a scale per rounded number."""
    inputs, letters = EQUATIONS[equation]
    with jax.enable_x64(False):
        x, weights = jnp.asarray(draw(seed, "BLI"), dtype), jnp.asarray(draw(seed + 1, letters))
        quantized = quantize_matrix(weights, inputs)
        y = np.asarray(quantized_product(equation, x, quantized), np.float64)
    x, weights, scales = (np.asarray(a, np.float64) for a in (x, weights, quantized.scales))
    steps = np.broadcast_to(np.expand_dims(scales, inputs), weights.shape)
    row_steps = np.broadcast_to(np.abs(x).max(-1, keepdims=True) / 127, x.shape)
    bound = np.einsum(equation, np.abs(x), steps) / 2 + np.einsum(equation, row_steps, np.abs(weights) + steps / 2) / 2
    exact = np.einsum(equation, x, weights)
    assert (np.abs(y - exact) <= 1.001 * bound + 2.0**-8 * np.abs(exact) * (dtype == "bfloat16")).all()


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("unsigned", [True, False], ids=["unsigned", "signed"])
@given(seed=SEEDS)
def test_a_product_of_integers_is_exact(equation: str, unsigned: bool, seed: int) -> None:
    """Also on a CPU of the other kind, with or without instructions for unsigned integers."""
    inputs, letters = EQUATIONS[equation]
    rng = np.random.default_rng(seed)
    x, weights = rng.integers(-127, 128, (2, 3, 19)), rng.integers(-127, 128, [SIZES[a] for a in letters])
    x[..., 0] = 127
    np.moveaxis(weights, inputs, 0)[0] = -127  # so that all scales are 1
    with jax.enable_x64(False), mock.patch.object(integer_products, "has_unsigned_products", return_value=unsigned):
        quantized = quantize_matrix(jnp.asarray(weights, jnp.float32), inputs)
        y = quantized_product(equation, jnp.asarray(x, jnp.float32), quantized)
    np.testing.assert_array_equal(np.asarray(y), np.einsum(equation, x, weights))


@pytest.mark.parametrize("unsigned", [True, False], ids=["unsigned", "signed"])
def test_the_program_multiplies_what_the_cpu_has_instructions_for(unsigned: bool) -> None:
    arguments = jnp.ones((2, 3, 19), jnp.int8), jnp.ones((19, 24), jnp.int8), jnp.full(24, 19, jnp.int32)
    with mock.patch.object(integer_products, "has_unsigned_products", return_value=unsigned):
        program = jax.jit(lambda *args: integer_products.integer_product("BLI,IO->BLO", *args)).lower(*arguments)
    assert (
        f"(tensor<2x3x19x{'ui8' if unsigned else 'i8'}>, tensor<19x24xi8>) -> tensor<2x3x24xi32>" in program.as_text()
    )


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t: sse avx512_vnni amx_bf16", True),
        ("flags\t: sse avx_vnni", False),
        ("Features\t: asimd", False),
        (None, False),
    ],
)
def test_which_cpus_have_the_instructions(
    cpuinfo: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n")
    monkeypatch.setattr(integer_products, "_CPUINFO", tmp_path / "cpuinfo")
    assert integer_products.has_unsigned_products.__wrapped__() == expected


def test_rows_of_zeros_give_zeros() -> None:
    y = quantized_product("BLI,IO->BLO", jnp.zeros((1, 2, 19)), quantize_matrix(jnp.zeros((19, 24)), 0))
    assert not np.asarray(y).any()


def test_the_program_of_a_cpu_multiplies_bytes() -> None:
    """No wide copy of the weights (19, 24): XLA would make one if it did not use the instructions."""
    weights = Quantized(jnp.ones((19, 24), jnp.int8), jnp.ones(24, jnp.float32), jnp.full(24, 19, jnp.int32))
    arguments = jnp.ones((2, 3, 19), jnp.float32), weights
    program = jax.jit(lambda *args: quantized_product("BLI,IO->BLO", *args)).lower(*arguments).compile()
    text = program.as_text()
    assert text is not None
    assert "s32[19,24]" not in text
    assert "s8[19,24]" in text


def tiny(**fields: Any) -> Transformer:
    config = TransformerConfig(
        src_vocab_size=37, tgt_vocab_size=37, d_model=24, num_heads=3, d_ff=40, num_encoder_layers=2,
        num_decoder_layers=2, decoder_start_id=1, max_length=12, **fields,
    )  # fmt: skip
    with jax.enable_x64(False):
        return Transformer.from_arrays(config, {n: jnp.asarray(a) for n, a in random_arrays(config, 0).items()})


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [
        pytest.param("float32", True, id="float32-tied"),
        pytest.param("bfloat16", False, id="bfloat16-untied"),
        pytest.param("float32", False, id="float32-untied", marks=pytest.mark.slow),
        pytest.param("bfloat16", True, id="bfloat16-tied", marks=pytest.mark.slow),
    ],
)
def test_a_quantized_model_decodes_and_scores(tied: bool, dtype: Any) -> None:
    model = tiny(shared_embeddings=tied, tied_output=tied, compute_dtype=dtype)
    quantized = model.quantized()
    arrays = named_arrays(quantized)
    names = {name for name, array in arrays.items() if isinstance(array, Quantized)}
    expected = {name for name in arrays if name.endswith(".kernel")}
    assert names == (expected | {"src_embedding.embedding"} if tied else expected)
    batch = random_batch(model.config, np.random.default_rng(0), 4, 7, 5)
    src, tgt = np.maximum(batch.src_tokens, 3), np.maximum(batch.tgt_tokens, 3)
    with jax.enable_x64(False):
        decoded = generate(quantized, src, DecodingConfig(beam_size=3))
        quantized_scores, scores = (score(m, src, tgt).tokens for m in (quantized, model))
    assert np.isfinite(decoded.scores).all()
    difference = np.abs(quantized_scores - scores)
    assert 0 < difference.max() < 0.5  # nats; two layers of random weights, so an error in a scale gives several
