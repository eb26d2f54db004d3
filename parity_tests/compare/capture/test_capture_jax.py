"""Traces of JAX functions and modules, against JAX's own results in float64."""

import functools
import re

import equinox
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from parity_tests.compare.capture.test_recording import assert_stored
from twinax.compare.capture import primitives
from twinax.compare.capture.jax_models import as_function
from twinax.compare.capture.jax_trace import capture_jax
from twinax.compare.capture.primitives import PRIMITIVES
from twinax.compare.capture.trace import CaptureError
from twinax.flax_transformer.xla_cpu.maxima import log_softmax, softmax

pytestmark = pytest.mark.newest

LINE = __file__.rpartition("/")[2]


def assert_traced(function, *arrays):
    """The trace's outputs and names of its operations; every output equals what JAX computes."""
    trace = capture_jax(lambda parameters, *inputs: function(*inputs), {}, arrays)
    expected = jax.tree.leaves(function(*(jnp.asarray(a) for a in arrays)))
    outputs = [trace.values[number] for number in trace.outputs.values()]
    assert len(outputs) == len(expected)
    for output, value in zip(outputs, expected, strict=True):
        assert (output.shape, output.dtype) == (value.shape, value.dtype)
        np.testing.assert_allclose(output, value, rtol=1e-12, atol=1e-13)
    assert_stored(trace)
    return trace, {operation.name for operation in trace.operations}


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# JAX's functions of one array, of positive numbers, of numbers in -1..1, of two arrays
ONE = (
    *("exp", "exp2", "expm1", "tanh", "sin", "cos", "tan", "sinh", "cosh", "asinh", "neg", "abs", "sign", "floor"),
    *("ceil", "erf", "erfc", "logistic", "cbrt", "square", "is_finite", "atan"),
)
POSITIVE = ("log", "log1p", "sqrt", "rsqrt")
UNIT = ("asin", "acos", "atanh", "erf_inv")
TWO = ("add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "eq", "ne", "lt", "le", "gt", "ge", "nextafter")
OTHERS = {
    "psum": lambda x: jax.vmap(lambda row: row - lax.pmean(row, "rows"), axis_name="rows")(x),
    "add_any": jax.grad(lambda x: (jnp.sin(x) * x).sum()),
    "acosh": lambda x: lax.acosh(1 + x * x),
    "integer_pow": lambda x: (lax.integer_pow(x, 3), lax.integer_pow(x, -2)),
    "and": lambda x: (x > 0) & (x < 1),
    "or": lambda x: (x > 1) | (x < 0),
    "xor": lambda x: (x > 1) ^ (x < 0.5),
    "not": lambda x: (~(x > 0), ~(x > 0).astype(int)),
    "clamp": lambda x: lax.clamp(-0.5, x, 0.7),
    "select_n": lambda x: (jnp.where(x > 0, x, 2.0), lax.select_n((x > 0).astype(np.int32) + (x > 1), x, x + 1, x * 2)),
    "round": lambda x: (jnp.round(4 * x) / 2, lax.round(jnp.round(4 * x) / 2), lax.round(x)),
    "convert_element_type": lambda x: ((9 * x).astype(int), x.astype(bool), (x > 0).astype(float)),
    "reduce_sum": lambda x: (x.sum(1), (9 * x).astype(np.int32).sum()),
    "reduce_max": lambda x: (x.max(0), jnp.ones((0, 2)).sum(0)),
    "reduce_min": lambda x: x.min((0, 1)),
    "reduce_prod": lambda x: x.prod(-1),
    "reduce_and": lambda x: (x > -1).all(0),
    "reduce_or": lambda x: (x > 1).any(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(0),
    "cumsum": lambda x: (x.cumsum(1), lax.cumsum(x, 0, reverse=True), (9 * x).astype(np.int32).cumsum(0)),
    "cumprod": lambda x: lax.cumprod(x, 1),
    "cummax": lambda x: lax.cummax(x, 1, reverse=True),
    "cummin": lambda x: lax.cummin(x, 0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "sort": lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), lax.sort((jnp.round(x), x), num_keys=2)),
    "dot_general": lambda x: (jnp.einsum("ab,cb->ac", x, x), jnp.einsum("ab,ac->abc", x, x), x @ x[0]),
    "dot_general of bytes": lambda x: lax.dot(
        jnp.full((1, 3), 100, np.int8), jnp.full((3, 1), 100, np.int8), preferred_element_type=np.int32
    ),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (*x.shape[:1], 3, *x.shape[1:])),
    "iota": lambda x: x + jnp.arange(x.shape[1]) + lax.broadcasted_iota(np.float32, x.shape, 0),
    "pad": lambda x: (lax.pad(x, 2.0, ((1, 2, 1), (0, 1, 2))), lax.pad(x, 0.0, ((-1, 1, 0), (2, -1, 1)))),
    "reshape": lambda x: x.reshape(-1, 1, 1),
    "transpose": lambda x: x.T,
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "rev": lambda x: x[::-1, ::-1],
    "concatenate": lambda x: jnp.concatenate([x, x + 1], 1),
    "slice": lambda x: x[1:, ::2],
    "dynamic_slice": lambda x: tuple(lax.dynamic_slice(x, (jnp.asarray(n), 0), (2, 1)) for n in (-1, 0, 1, 99)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1, :1] + 9, (jnp.asarray(7), jnp.asarray(-1))),
    "split": lambda x: jnp.split(x, [1], axis=1),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, x + 1)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 11, 52),
    "stop_gradient": lambda x: lax.stop_gradient(x) + 1,
    "copy": lambda x: jnp.array(x, copy=True),
    "gather": lambda x: (x[jnp.array([1, 0, 1])], jnp.take(x, jnp.array([0, 1]), axis=1)),
    "scatter-add": lambda x: x.at[jnp.array([0, 0])].add(1.5),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], jnp.ones((2, 1, 2, 2)), (1, 1), "SAME"),
    "top_k": lambda x: lax.top_k(x, 2),
    "complex": lambda x: (x + 1j).imag + jnp.conj(x + 2j).real,
}


@given(seed=st.integers(0, 2**31))
@settings(max_examples=1)
def test_every_primitive_is_jax_s(seed):
    x, y = rows(seed, 3, 4), rows(seed + 1, 3, 4)
    functions = {name: (getattr(lax, name), (x,)) for name in ONE}
    functions |= {name: (getattr(lax, name), (np.abs(x),)) for name in POSITIVE}
    functions |= {name: (getattr(lax, name), (np.tanh(x),)) for name in UNIT}
    functions |= {name: (getattr(lax, name), (np.abs(x) if name == "pow" else x, y)) for name in TWO}
    functions |= {name: (function, (x,)) for name, function in OTHERS.items()}
    names = set()
    for function, arrays in functions.values():
        names |= assert_traced(function, *arrays)[1]
    assert PRIMITIVES.keys() - names <= {"device_put", "expand_dims", "name", "pvary", "sharding_constraint"}


def test_whole_numbers_divide_as_in_jax():
    a, b = np.array([7, -7, 7, -7, 5], np.int32), np.array([2, 2, -2, -2, 0], np.int32)
    assert_traced(lambda a, b: (lax.div(a, b), lax.rem(a, jnp.where(b == 0, 1, b)), a // jnp.where(b == 0, 1, b)), a, b)


CONTROL = {
    "scan": lambda x: lax.scan(lambda c, t: (c * 0.5 + t, (c, t * c)), x[0], x),
    "scan from the end": lambda x: lax.scan(lambda c, t: (c * 0.5 + t, c), x[0], x, reverse=True),
    "scan of nothing": lambda x: lax.scan(lambda c, t: (c, t * 2), x[0], x[:0]),
    "scan without rows": lambda x: lax.scan(lambda c, _: (c * 0.5, None), x, None, length=3),
    "scan in scan": lambda x: lax.scan(lambda c, t: lax.scan(lambda d, u: (d + u, d), c, t), 0.0, x),
    "while": lambda x: lax.while_loop(lambda c: c[1] < 4, lambda c: (c[0] * 1.1, c[1] + 1), (x, 0)),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: c + i * x, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda y: y + 1, lambda y: y * 2, x),
    "switch": lambda x: lax.switch(7, [jnp.sin, jnp.cos, jnp.tanh], x),
    "jit in jit": lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1)(x),
    "remat": lambda x: jax.checkpoint(lambda y: jnp.sin(y) * y)(x),
    "custom_jvp": lambda x: (jax.nn.relu(x), jax.nn.logsumexp(x, 1), jax.nn.silu(x)),
    "gradient": lambda x: jax.grad(lambda y: jax.nn.gelu(jnp.sin(y) @ y.T).sum())(x),
    "vmap": lambda x: jax.vmap(lambda row, i: row[i])(x, jnp.arange(x.shape[0]) % 2),
    "constants": lambda x: x + np.arange(3.0) + jnp.float32(0.1),
}


def twice(x):
    return 2 * x


twice_custom = jax.custom_vjp(twice)
twice_custom.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


@pytest.mark.parametrize("name", [*CONTROL, "custom_vjp"])
def test_control_flow(name):
    assert_traced(CONTROL.get(name, lambda x: twice_custom(x) + 1), rows(3, 3, 3))


def test_a_parameter_that_is_not_known_leaves_the_primitive_to_jax(monkeypatch):
    """As one that a newer JAX has: the line is named, and the result is JAX's."""
    monkeypatch.setitem(PRIMITIVES, "cumsum", lambda x, *, axis: np.cumsum(x, axis))
    primitives._known.cache_clear()
    trace, _ = assert_traced(lambda x: lax.cumsum(x, 1, reverse=True), rows(0, 2, 3))
    primitives._known.cache_clear()
    assert len(trace.notes) == 1
    assert re.fullmatch(rf".*{LINE}:\d+: cumsum: computed by JAX, because of reverse", trace.notes[0])
    with pytest.raises(
        CaptureError, match=r"^scan has no parameter num_consts in jax [\d.]+; record the model with an o"
    ):
        primitives.scan_counts({"length": 3})


@pytest.mark.parametrize("is_evaluable", [True, False])
def test_a_primitive_that_is_not_known_is_computed_by_jax(is_evaluable):
    """One of another library."""
    primitive = jax.extend.core.Primitive("custom")
    primitive.def_abstract_eval(lambda x: x)
    if is_evaluable:
        primitive.def_impl(lambda x: x + 1)
        trace = capture_jax(lambda p, x: primitive.bind(x), {}, (rows(0, 2, 3),))
        np.testing.assert_array_equal(trace.values[trace.outputs["output"]], rows(0, 2, 3) + 1)
    else:
        with pytest.raises(CaptureError, match=rf"{LINE}:\d+: custom cannot be computed by itself: NotImpl"):
            capture_jax(lambda p, x: primitive.bind(x), {}, (rows(0, 2, 3),))


def test_a_dtype_in_a_field_of_a_module_is_no_parameter():
    class Cast(equinox.Module):
        scale: jax.Array
        dtype: type = jnp.float32

        def __call__(self, x):
            return (x * self.scale).astype(self.dtype)

    trace = capture_jax(*as_function(Cast(jnp.ones(3))), (rows(0, 2, 3),))
    assert list(trace.parameters) == ["scale"]
    np.testing.assert_array_equal(trace.values[trace.outputs["output"]], rows(0, 2, 3))


def test_a_branch_that_is_not_taken_is_named():
    trace, _ = assert_traced(lambda x: lax.cond(x.sum() > 1e9, jnp.sin, jnp.cos, x), rows(0, 2, 2))
    (branch,) = trace.branches
    assert branch.endswith(": branch 1 of 2")
    assert branch.startswith(f"capture/{LINE}:")


def test_of_the_forms_for_platforms_the_default_is_taken():
    """That for a CPU may look at the bits of float32, which are kept as float64; none counts as not taken."""

    def function(parameters, x):
        forms = {"cpu": lambda x: lax.bitcast_convert_type(x, jnp.int32) * 1.0, "default": jnp.sin}
        return lax.platform_dependent(x, **forms), softmax(x), log_softmax(x)

    x = rows(0, 2, 48).astype(np.float32)
    trace = capture_jax(function, {}, (x,))
    first, second, third = (trace.values[trace.outputs[str(i)]] for i in range(3))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(first, np.sin(wide), rtol=1e-14)
    np.testing.assert_allclose(second, jax.nn.softmax(wide), rtol=1e-14)
    np.testing.assert_allclose(third, jax.nn.log_softmax(wide), rtol=1e-14)
    assert not trace.branches


@jax.custom_jvp
def looked_up(table, numbers):
    return table[numbers]


@looked_up.defjvp
def _(primals, tangents):
    return looked_up(*primals), tangents[0][primals[1]]


def test_integers_have_a_tangent_without_a_value():
    """JAX passes it to a `custom_jvp` as an array of float0."""
    table, numbers = rows(0, 4, 3), np.array([2, 0, 2])
    gradient = jax.grad(lambda table: jnp.sin(looked_up(table, jnp.asarray(numbers))).sum())
    assert_traced(gradient, table)


def layer(parameters, x):
    hidden = x @ parameters["w"] + parameters["b"]
    return jnp.tanh(hidden), parameters["c"]


PARAMETERS = {"w": rows(1, 3, 4).astype(np.float32), "b": np.zeros(4, np.float32), "c": np.ones(2), "d": np.ones(1)}


def test_parameters_lines_and_what_no_output_needs():
    trace = capture_jax(layer, PARAMETERS, (rows(0, 2, 3),))
    assert list(trace.parameters) == ["b", "c", "d", "w"]
    assert trace.unused_parameters() == ["d"]
    assert list(trace.outputs) == ["0", "1"]
    first = layer.__code__.co_firstlineno
    lines = {operation.name: operation.line for operation in trace.operations}
    assert lines["dot_general"] == f"capture/{LINE}:{first + 1}"
    assert lines["tanh"] == f"capture/{LINE}:{first + 2}"


@jax.jit
def compiled(x):
    return jnp.sin(x)


def calling(parameters, x):
    y = jnp.tanh(compiled(x))
    return compiled(y)  # whose program is cached


def test_lines_of_a_compiled_function_have_those_of_each_call():
    trace = capture_jax(calling, {"w": np.ones(2)}, (np.ones(2),))
    lines = [operation.lines[:2] for operation in trace.operations if operation.name == "sin"]
    inner, first = (function.__code__.co_firstlineno + 1 for function in (compiled.__wrapped__, calling))
    inner += 1  # its decorator
    assert lines == [(f"capture/{LINE}:{inner}", f"capture/{LINE}:{first + i}") for i in range(2)]


def test_replay_continues_with_changed_values():
    x = rows(0, 2, 3)
    trace = capture_jax(layer, PARAMETERS, (x,))
    (product,) = next(o.outputs for o in trace.operations if o.name == "dot_general")
    changed = trace.replay({product: np.full((2, 4), 0.5)})
    np.testing.assert_allclose(changed[trace.outputs["0"]], np.tanh(np.full((2, 4), 0.5)))
    changed = trace.replay({trace.parameters["w"]: np.zeros((3, 4))})
    assert not changed[trace.outputs["0"]].any()
    assert trace.replay({product: np.zeros((2, 4))}, []).keys() == {product}


def test_narrow_dtypes_are_computed_in_float64():
    """Casts in the code too; code that insists on float32 is traced in it. Constants keep what float32 left of them."""

    def function(parameters, x, insists):
        assert x.dtype == jnp.float32 or not insists
        return (x.astype(jnp.bfloat16) * jnp.bfloat16(0.5)).astype(jnp.float32) + jnp.float32(0.1)

    x = rows(0, 2, 3).astype(np.float32)
    for insists in (True, False):
        output = capture_jax(functools.partial(function, insists=insists), {}, (x,)).values[-1]
        np.testing.assert_array_equal(output, x.astype(np.float64) * 0.5 + np.float64(np.float32(0.1)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.norm(x))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.dropout(x)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="dense")(linen.LayerNorm(name="norm")(x))


class TreeBlock(equinox.Module):
    layers: list
    scale: float = 2.0

    def __call__(self, x):
        for one in self.layers:
            x = jax.vmap(one)(x) * self.scale
        return x


def models():
    nnx_model = Stack(nnx.Rngs(0))
    nnx_model.eval()
    linen_model, x = LinenBlock(), jnp.asarray(rows(0, 2, 3))
    keys = jax.random.split(jax.random.key(0), 2)
    tree = TreeBlock([equinox.nn.Linear(3, 3, key=key) for key in keys])
    variables = linen_model.init(jax.random.key(0), x)
    return {
        "nnx": (nnx_model, nnx_model, "blocks.1.linear", "blocks.1.linear.kernel"),
        "linen": ((linen_model, variables), lambda x: linen_model.apply(variables, x), "dense", "params.dense.kernel"),
        "equinox": (tree, tree, "", "layers.1.weight"),
        "function": ((lambda p, x: p["a"] * x, {"a": jnp.ones(3)}), lambda x: x, "", "a"),
    }


@pytest.mark.parametrize("kind", ["nnx", "linen", "equinox", "function"])
def test_models_of_each_library(kind):
    model, call, module, parameter = models()[kind]
    x = rows(0, 2, 3)
    classes = {cls: cls.__call__ for cls in (Block, Stack, nnx.Linear, equinox.nn.Linear)}
    trace = capture_jax(*as_function(model), (x,))
    np.testing.assert_allclose(trace.values[trace.outputs["output"]], call(jnp.asarray(x, jnp.float32)), atol=1e-6)
    assert parameter in trace.parameters
    products = [o for o in trace.operations if o.name == "dot_general"]
    assert not products or module in products[-1].module
    assert classes == {cls: cls.__call__ for cls in classes}


def fails(parameters, x):
    raise RuntimeError("no\nsecond line")


def on_a_mesh(p, x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)


def foreign(p, x):
    return jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


REFUSED = [
    (fails, r"^fails: JAX cannot trace it: RuntimeError: no \([^ ]+\.py:\d+\)$"),
    (lambda p, x: x if x.sum() > 0 else -x, "cannot trace it: TracerBoolConversionError"),
    (on_a_mesh, r"shard_map does not expose its operations; compare the model on one device$"),
    (foreign, r"\.py:\d+: ffi_call does not expose its operations; switch to an implementation in JAX$"),
    (
        lambda p, x: x * jax.random.normal(jax.random.key(0), x.shape),
        r"\.py:\d+: .* draws random numbers; switch them off",
    ),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_cannot_be_traced(function, message):
    with pytest.raises(CaptureError, match=message) as error:
        capture_jax(function, {}, (rows(0, 2, 2),))
    assert "\n" not in str(error.value)


def test_random_numbers_that_reach_no_output_do_not_matter():
    def function(parameters, x):
        jax.random.normal(jax.random.key(0), x.shape)
        return x + 1

    assert capture_jax(function, {}, (rows(0, 2, 2),)).operations


@pytest.mark.parametrize("model", [3, "x", (3, {}), LinenBlock()])
def test_what_is_no_model(model):
    with pytest.raises(CaptureError, match="is not a supported model; return a PyTorch"):
        as_function(model)
