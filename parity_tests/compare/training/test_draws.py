"""The random numbers of the reference are put into the candidate, whatever their location, scale and arrangement."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinax.compare.comparison import compare

RANDOM = np.random.default_rng(0)
SHAPES = {"e": (6, 8), "m": (8, 3), "s": (8, 3), "d": (3, 6), "t": (20, 6)}
ARRAYS = {name: RANDOM.standard_normal(shape) for name, shape in SHAPES.items()}
TENSORS = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
X = RANDOM.standard_normal((5, 6))


def autoencoder(p, x):
    hidden = torch.tanh(x @ p["e"])
    mean, deviation = hidden @ p["m"], torch.exp(0.5 * (hidden @ p["s"]))
    return torch.distributions.Normal(mean, deviation).rsample() @ p["d"], mean


def autoencoder_port(p, x, mistake=""):
    """The noise is drawn in another arrangement."""
    hidden = jnp.tanh(x @ p["e"])
    mean, deviation = hidden @ p["m"], jnp.exp(0.5 * (hidden @ p["s"]))
    noise = jax.random.normal(jax.random.key(3), mean.shape[::-1]).T
    noise = 0.5 * noise if mistake == "scale" else noise  # scale
    z = mean if mistake == "missing" else mean + deviation * noise
    return z @ p["d"], mean


def diffusion(p, x):
    time = torch.randint(0, 20, (len(x),))
    noise = torch.randn_like(x)
    kept = torch.linspace(0.99, 0.1, 20)[time][:, None]
    noisy = torch.sqrt(kept) * x + torch.sqrt(1 - kept) * noise
    return torch.mean((torch.tanh(noisy @ p["e"]) @ p["m"] @ p["d"] + p["t"][time] - noise) ** 2), noisy


def diffusion_port(p, x, mistake=""):
    """The noise is drawn before the time."""
    keys = jax.random.split(jax.random.PRNGKey(0))
    noise = jax.random.normal(keys[0], x.shape)
    time = jax.random.randint(keys[1], (len(x),), 0, 19 if mistake == "range" else 20)  # range
    kept = jnp.linspace(0.99, 0.1, 20)[time][:, None]
    noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
    target = noise + x if mistake == "target" else noise  # target
    return jnp.mean((jnp.tanh(noisy @ p["e"]) @ p["m"] @ p["d"] + p["t"][time] - target) ** 2), noisy


def several(p, x):
    uniform, normal = torch.empty(5, 8).uniform_(-0.5, 0.5), torch.empty(5, 8).normal_(1.0, 2.0)
    gumbel = -torch.empty(8, 5).exponential_().log().T
    chosen = torch.softmax((x @ p["e"] + gumbel) / 0.7, -1)
    return torch.dropout(torch.tanh(x @ p["e"] + uniform) * normal * chosen, 0.4, True)


def several_port(p, x):
    keys = jax.random.split(jax.random.key(0), 4)
    uniform, normal = jax.random.uniform(keys[0], (5, 8), minval=-0.5, maxval=0.5), jax.random.normal(keys[1], (5, 8))
    chosen = jax.nn.softmax((x @ p["e"] + jax.random.gumbel(keys[2], (5, 8))) / 0.7)
    y = jnp.tanh(x @ p["e"] + uniform) * (1 + 2 * normal) * chosen
    return jnp.where(jax.random.bernoulli(keys[3], 0.6, y.shape), y / 0.6, 0)


def line_of(comment):
    source, first = inspect.getsourcelines(inspect.getmodule(line_of))
    (number,) = (i for i, line in enumerate(source, max(first, 1)) if line.endswith(f"# {comment}\n"))
    return f"training/test_draws.py:{number}"


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [(autoencoder, autoencoder_port), (diffusion, diffusion_port), (several, several_port), (several_port, several)],
)
def test_a_correct_port_is_equal_in_outputs_and_gradients(reference, candidate):
    sides = ((side, ARRAYS if side.__name__.endswith("port") else TENSORS) for side in (reference, candidate))
    comparison = compare(*sides, (X,), dropout=True, gradients=True)
    assert comparison.verdict == "equal", str(comparison)
    assert comparison.backward is not None


@pytest.mark.parametrize(
    ("reference", "candidate", "mistake"),
    [
        (autoencoder, autoencoder_port, "scale"),
        (diffusion, diffusion_port, "target"),
        (diffusion, diffusion_port, "range"),
    ],
)
def test_a_mistake_beside_random_numbers_is_the_only_difference(reference, candidate, mistake):
    port = (lambda p, x: candidate(p, x, mistake)), ARRAYS
    (defect,) = compare((reference, TENSORS), port, (X,), dropout=True).forward.defects
    assert [*defect.lines] == [line_of(mistake)]
    if mistake == "range":
        assert "random numbers from 0 to 18; those of training/test_draws.py:" in str(defect)


def test_random_numbers_that_one_side_alone_draws_are_named():
    port = (lambda p, x: autoencoder_port(p, x, "missing")), ARRAYS
    comparison = compare((autoencoder, TENSORS), port, (X,), dropout=True)
    assert str(comparison.forward.defects[0]).endswith("normal random numbers that the candidate does not have")


def test_images_with_channels_last_start_from_the_same_noise():
    """Nothing is there yet that would tell the arrangement but the shapes."""
    kernel = RANDOM.standard_normal((4, 3))

    def reference(p, x):
        return torch.einsum("bchw,cd->bdhw", torch.randn(2, 4, 6, 6), p["k"]) * x

    def candidate(p, x):
        return jnp.einsum("bhwc,cd->bhwd", jax.random.normal(jax.random.key(0), (2, 6, 6, 4)), p["k"]) * x

    x = RANDOM.standard_normal(1)
    sides = (reference, {"k": torch.from_numpy(kernel)}), (candidate, {"k": kernel})
    assert compare(*sides, (x,), dropout=True).verdict == "equal"
