"""The gradient of a table: both forms of it against numpy's sum, and which platform computes which."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax.flax_transformer.lookup import rows, sum_runs

pytestmark = pytest.mark.newest

WIDTH = 3


@partial(jax.jit, static_argnums=2)
def found_and_sums(numbers: jax.Array, gradient: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """(rows of a table of zeros, its gradient by either form)."""
    found, pullback = jax.vjp(lambda table: rows(table, numbers), jnp.zeros((count, WIDTH), jnp.float64))
    return found, pullback(gradient)[0], sum_runs(numbers, gradient, count)


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from([1, 4, 120]),  # with 120 rows and 20 numbers, targets exceed int8
    batch=st.sampled_from([0, 5]),
    dtype=st.sampled_from([np.int8, np.int32]),
)
def test_the_gradient_of_a_table_is_numpy_s_sum(seed: int, count: int, batch: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-count - 2, count + 2, (batch, 4)).astype(dtype)  # some are outside the table
    numbers[rng.random(numbers.shape) < 0.2] = np.iinfo(dtype).max
    gradient = rng.standard_normal((*numbers.shape, WIDTH))
    expected = np.zeros((count, WIDTH))
    fits = (-count <= numbers) & (numbers < count)
    np.add.at(expected, numbers[fits], gradient[fits])
    found, *both_sums = found_and_sums(jnp.asarray(numbers), jnp.asarray(gradient), count)
    assert np.isnan(found).all(-1).tolist() == (~fits).tolist()
    for sums in both_sums:
        assert sums.dtype == jnp.float64
        np.testing.assert_allclose(sums, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("platform", "sorts", "unique"), [("cpu", 0, "false"), ("tpu", 0, "false"), ("cuda", 1, "true")]
)
def test_a_gpu_sorts_and_scatters_each_row_once(platform: str, sorts: int, unique: str) -> None:
    table, numbers = jnp.zeros((7, WIDTH)), jnp.zeros((2, 4), jnp.int32)
    gradient = jax.jit(jax.grad(lambda table: jnp.sin(rows(table, numbers)).sum()))
    program = gradient.trace(table).lower(lowering_platforms=(platform,)).as_text()
    assert program.count("stablehlo.sort") == sorts
    (scatter,) = [line for line in program.splitlines() if "stablehlo.scatter" in line]
    assert f"unique_indices = {unique}" in scatter


def test_several_gpus_do_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort along the batch, which is sharded, would gather it on every device."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    numbers = jnp.zeros((2, 3), jnp.int32)  # a shape of its own: JAX traces the gradient once per shape
    gradient = jax.jit(jax.grad(lambda table: rows(table, numbers).sum()))
    program = gradient.trace(jnp.zeros((7, WIDTH))).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.scatter" in program
    assert "stablehlo.sort" not in program


def test_a_gradient_is_exported_for_any_batch() -> None:
    table = jnp.zeros((7, WIDTH))
    numbers = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, l"), jnp.int32)
    gradient = jax.jit(jax.grad(lambda table, numbers: rows(table, numbers).sum()))
    exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(table, numbers)
    assert exported.call(table, jnp.array([[1, 1], [1, 6]], jnp.int32))[:, 0].tolist() == [0, 3, 0, 0, 0, 0, 1]


def test_derivatives_are_those_of_take() -> None:
    rng = np.random.default_rng(0)
    table, numbers = jnp.asarray(rng.standard_normal((7, WIDTH))), jnp.asarray(rng.integers(0, 7, (2, 4)))

    def derivatives(look_up):
        f = lambda table: jnp.sin(look_up(table, numbers)).sum()  # noqa: E731
        mapped = jax.vmap(jax.grad(f))(jnp.stack([table, 2 * table]))
        return [f(table), jax.grad(f)(table), jax.jvp(f, (table,), (table,))[1], jax.hessian(f)(table), mapped]

    for one, other in zip(derivatives(rows), derivatives(lambda t, n: jnp.take(t, n, axis=0)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
