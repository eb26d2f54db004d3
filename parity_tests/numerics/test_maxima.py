"""Softmax, maxima and top-k against jax.nn and jax.lax: equal values, the same choice between equal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax.flax_transformer.xla_cpu.maxima import BLOCK, log_softmax, row_max, softmax, top_k

WIDTHS = [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 203]
DTYPES = ["float32", "float64"]
KINDS = {
    "normal": lambda rng, shape: rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4),
    "few values": lambda rng, shape: rng.integers(-2, 2, size=shape) / 2,
    "negative": lambda rng, shape: -np.abs(rng.normal(size=shape)),
    "mostly -inf": lambda rng, shape: np.where(rng.random(shape) < 0.9, -np.inf, rng.integers(-3, 3, size=shape)),
    "largest and smallest": lambda rng, shape: rng.choice([3e38, -3e38, 1e-40, -1e-40, 0.0, 1.0], size=shape),
}
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_maxima_are_exact(width: int, dtype: str) -> None:
    compiled = jax.jit(row_max)

    @given(seed=SEEDS, kind=st.sampled_from(sorted(KINDS)))
    def check(seed: int, kind: str) -> None:
        x = jnp.asarray(KINDS[kind](np.random.default_rng(seed), (3, 2, width)), dtype)
        np.testing.assert_array_equal(np.asarray(compiled(x)), np.asarray(x).max(-1))

    check()


@pytest.mark.parametrize("width", [1, BLOCK + 1, 203])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_and_its_gradient(width: int, dtype: str) -> None:
    """Within a few roundings of jax.nn's; NaN and infinity as there."""
    tolerance = 8 * float(jnp.finfo(dtype).eps)

    def both(functions, x, gradient):
        values, backward = jax.vjp(lambda x: tuple(f(x) for f in functions), x)
        return *values, *backward((gradient, jnp.zeros_like(x))), *backward((jnp.zeros_like(x), gradient))

    candidates = jax.jit(lambda *args: both((softmax, log_softmax), *args))
    references = jax.jit(lambda *args: both((jax.nn.softmax, jax.nn.log_softmax), *args))

    @given(seed=SEEDS, special=st.sampled_from([0.0, jnp.inf, -jnp.inf, jnp.nan]))
    def check(seed: int, special: float) -> None:
        rng = np.random.default_rng(seed)
        x, gradient = (jnp.asarray(rng.normal(size=(4, width)) * 3, dtype) for _ in range(2))
        x = x.at[0, rng.integers(width)].set(special)
        for candidate, reference in zip(candidates(x, gradient), references(x, gradient), strict=True):
            np.testing.assert_allclose(candidate, reference, rtol=tolerance, atol=8 * tolerance)

    check()


@pytest.mark.parametrize("shape", [(0, 3), (0, 48), (2, 0)])
def test_softmax_of_nothing(shape: tuple[int, ...]) -> None:
    x = jnp.zeros(shape, jnp.float32)
    assert softmax(x).shape == log_softmax(x).shape == shape


@pytest.mark.parametrize("width", [1, BLOCK, 4 * BLOCK, 203])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k(width: int, rows: int, count: int, dtype: str) -> None:
    """Values and indices of `jax.lax.top_k`, except for the indices of -inf, which are those of some -inf."""
    count = min(count, rows * width)
    compiled = jax.jit(lambda x: top_k(x, count))

    @given(seed=SEEDS, kind=st.sampled_from(sorted(KINDS)))
    def check(seed: int, kind: str) -> None:
        x = jnp.asarray(KINDS[kind](np.random.default_rng(seed), (2, rows, width)), dtype)
        values, indices = compiled(x)
        expected_values, expected = jax.lax.top_k(x.reshape(2, -1), count)
        np.testing.assert_array_equal(values, expected_values)
        np.testing.assert_array_equal(jnp.take_along_axis(x.reshape(2, -1), indices, axis=1), values)
        finite = np.asarray(values) > -np.inf
        np.testing.assert_array_equal(np.asarray(indices)[finite], np.asarray(expected)[finite])

    check()


@pytest.mark.parametrize("width", [1, BLOCK, 203])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_nan_is_lost(width: int, dtype: str) -> None:
    """NaNs of both signs are the largest: on x86, 0/0 has a sign bit."""
    top = jax.jit(lambda x: top_k(x, 2))

    @given(seed=SEEDS, kind=st.sampled_from(sorted(KINDS)), sign=st.sampled_from([1.0, -1.0]))
    def check(seed: int, kind: str, sign: float) -> None:
        rng = np.random.default_rng(seed)
        x = KINDS[kind](rng, (2, 3, width)).astype(dtype)
        row, column = rng.integers(3), rng.integers(width)
        x[0, row, column] = np.copysign(np.nan, sign)
        expected = np.isnan(x).any(-1)
        np.testing.assert_array_equal(np.isnan(np.asarray(jax.jit(row_max)(x))), expected)
        values, indices = top(x)
        assert np.isnan(values).tolist() == [[True, False], [False, False]]
        assert indices[0, 0] == row * width + column

    check()


@pytest.mark.parametrize("width", [2 * BLOCK, 203])
def test_a_cpu_compares_integers(width: int) -> None:
    """No maximum of floats is left in the softmax of a CPU, and that of another platform has only those."""
    x = jnp.zeros((4, width), jnp.float32)
    on_cpu = jax.jit(softmax).trace(x).lower(lowering_platforms=("cpu",)).as_text()
    on_gpu = jax.jit(softmax).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    maxima = [line for line in on_cpu.splitlines() if "stablehlo.maximum" in line]
    assert maxima
    assert all("i32" in line for line in maxima)
    assert "bitcast_convert" not in on_gpu
    assert "optimization_barrier" not in on_gpu
