"""JAX's transformations of the model and of its loss: forward and reverse mode, nested, mapped, and exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export
from torch import nn

from twinax import TransformerConfig, flax_transformer, torch_reference
from twinax.configs.training import TrainingConfig
from twinax.convert.port import to_torch
from twinax.flax_transformer import layers
from twinax.flax_transformer.xla_cpu import products
from twinax.parity.functions import random_arrays, random_batch
from twinax.train.step import consistency

pytestmark = pytest.mark.newest

CONFIG = TransformerConfig.preset(
    "tiny", num_encoder_layers=1, num_decoder_layers=1, param_dtype="float64", compute_dtype="float64", ffn_dropout=0.2
)
ARRAYS = (0, 1, 2, 3)  # positions of the arguments to differentiate
TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f, ARRAYS),
    "jvp": lambda f: lambda *arrays: jax.jvp(f, arrays, arrays),
    "linearize": lambda f: lambda *arrays: jax.linearize(f, *arrays)[1](*arrays),
    "jacfwd": lambda f: jax.jacfwd(f, ARRAYS),
    "hessian": lambda f: jax.hessian(f, ARRAYS),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f, ARRAYS), ARRAYS),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, ARRAYS), ARRAYS),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, ARRAYS), ARRAYS),
    "third derivative": lambda f: jax.jacfwd(jax.hessian(f, 1), 0),
    "vmap of inputs": lambda f: lambda x, *rest: jax.vmap(jax.grad(f, ARRAYS), (0, *3 * [None]))(x[:, None], *rest),
    "vmap of weights": lambda f: lambda x, w, *rest: jax.vmap(lambda w: jax.jacfwd(f, 1)(x, w, *rest))(w[None]),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), ARRAYS),
    "jit": lambda f: jax.jit(jax.hessian(f, 1)),
}


def composed(x, weights, bias, factors):
    y = products.product("BLI,IO->BLO", x, weights)
    return jnp.sin(products.scale(products.add_bias(y, bias), factors)).astype(jnp.float32).sum()


def plain(x, weights, bias, factors):
    return jnp.sin((jnp.einsum("BLI,IO->BLO", x, weights) + bias) * factors).astype(jnp.float32).sum()


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-6), ("float32", 1e-4), ("bfloat16", 5e-2)])
def test_products_with_weights_are_plain_products(dtype, bound):
    """In one program per function, because each operation by itself would be another one."""
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(shape), dtype) for shape in ((2, 3, 4), (4, 5), (5,), (5,))]

    def transformed(function):
        return jax.jit(lambda *arrays: {name: f(function)(*arrays) for name, f in TRANSFORMATIONS.items()})(*arrays)

    results = (jax.tree_util.tree_leaves_with_path(transformed(function)) for function in (composed, plain))
    for (path, one), (_, other) in zip(*results, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        other = np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * float(abs(other).max()), err_msg=str(path))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_relu_is_jax_s(dtype):
    x = jnp.array([-jnp.inf, -2, -1e-30, -0.0, 0, 1e-30, 3, jnp.inf], dtype)
    factors = jnp.arange(1, 9, dtype=dtype)
    for transform in (lambda f: f, lambda f: lambda x: jax.vjp(f, x)[1](factors), lambda f: jax.jacfwd(f)):
        one, other = (jax.tree.leaves(transform(relu)(x)) for relu in (layers.ACTIVATIONS["relu"], jax.nn.relu))
        np.testing.assert_array_equal(one, other)


def test_the_gradient_of_relu_passes_nan_as_in_pytorch():
    x = torch.tensor([float("nan"), -1.0, 1.0], requires_grad=True)
    torch.relu(x).sum().backward()
    gradient = jax.grad(lambda x: layers.ACTIVATIONS["relu"](x).sum())(jnp.asarray(x.detach().numpy()))
    np.testing.assert_array_equal(gradient, x.grad)


class Loss(nn.Module):
    def __init__(self, model, training):
        super().__init__()
        self.model, self.training_config = model, training

    def forward(self, *arguments):
        return torch_reference.consistency.training_loss(self.model, *arguments, self.training_config)[0]


def test_second_derivatives_of_the_loss_are_pytorch_s():
    """L(t) = loss at (1 + t) θ: L' and L'' at 0, forward over reverse mode and the other way."""
    training = TrainingConfig(label_smoothing=0.1, consistency="r_drop")  # cross entropy and divergences
    arrays, batch = random_arrays(CONFIG, 0), random_batch(CONFIG, np.random.default_rng(0), 3, 6, 5)[:3]
    numbers = np.arange(3)

    def loss(t):
        model = flax_transformer.Transformer.from_arrays(CONFIG, {n: a * (1 + t) for n, a in arrays.items()})
        key = flax_transformer.DropoutKey(0, 1, jnp.asarray(numbers))
        return consistency.training_loss(model, *map(jnp.asarray, batch), key, training)[0]

    twin = to_torch(flax_transformer.Transformer.from_arrays(CONFIG, arrays))
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    moved = {f"model.{n}": p * (1 + t) for n, p in [*twin.named_parameters(), *twin.named_buffers()]}
    key = torch_reference.DropoutKey(0, 1, torch.from_numpy(numbers))
    total = torch.func.functional_call(Loss(twin, training), moved, (*map(torch.from_numpy, batch), key))
    (first,) = torch.autograd.grad(total, t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)

    def derivatives(t, inner, outer):
        return outer(lambda t: 2 * (inner(loss)(t),), has_aux=True)(t)

    modes = (jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)
    for result, gradient in jax.jit(lambda t: [derivatives(t, *mode) for mode in modes])(0.0):
        np.testing.assert_allclose(gradient, first.item(), rtol=1e-9)
        np.testing.assert_allclose(result, second.item(), rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_model_takes_any_batch_and_length(dtype):
    config = CONFIG.replace(param_dtype="float32", compute_dtype=dtype, ffn_dropout=0.0)
    arrays = {name: jnp.asarray(array) for name, array in random_arrays(config, 0).items()}

    def logits(arrays, src, tgt):
        return flax_transformer.Transformer.from_arrays(config, arrays)(src, tgt)

    def exported(*constraints):
        rows, source, target = export.symbolic_shape("b, s, t", constraints=constraints)
        tokens = [jax.ShapeDtypeStruct((rows, length), jnp.int32) for length in (source, target)]
        return export.export(jax.jit(logits))(arrays, *tokens)

    program = exported("s <= 64", "t <= 64")
    for shape in ((1, 1, 1), (3, 7, 5), (2, 64, 40)):
        tokens = [jnp.asarray(side, jnp.int32) for side in random_batch(config, np.random.default_rng(0), *shape)[:2]]
        expected = np.asarray(jax.jit(logits)(arrays, *tokens))
        result = np.asarray(jax.jit(program.call)(arrays, *tokens))
        assert abs(result - expected).max() / abs(expected).max() < (1e-5 if dtype == "float32" else 5e-2)
    with pytest.raises(ValueError, match=r"^src_tokens: length s may exceed the config's max_length=64; bound it"):
        exported()
