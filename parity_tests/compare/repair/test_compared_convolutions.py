"""Convolutions and poolings with channels last beside PyTorch's: the padding, and what an average counts."""

import inspect

import jax
import numpy as np
import pytest
import torch
from flax import linen

from twinax.compare.comparison import compare


class Stem(linen.Module):
    """Linen's port of a stem; each argument is the padding of one step."""

    conv: object = ((3, 3), (3, 3))
    pool: object = ((1, 1), (1, 1))
    counts: bool = True
    channels: int = 5

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(6, (7, 7), strides=(2, 2), padding=self.conv, use_bias=False)(x)  # conv
        x = linen.BatchNorm(use_running_average=True)(x)
        x = linen.max_pool(linen.relu(x), (3, 3), (2, 2), padding=self.pool)  # pool
        x = linen.Conv(self.channels, (3, 3), padding="SAME", use_bias=False)(x)
        return linen.avg_pool(x, (3, 3), (1, 1), padding="SAME", count_include_pad=self.counts)  # counts


LINES, FIRST = inspect.getsourcelines(Stem)


def line_of(mistake):
    number = FIRST + next(i for i, line in enumerate(LINES) if line.rstrip().endswith(f"# {mistake}"))
    return f"repair/test_compared_convolutions.py:{number}"


def compared(counted=True, channels=5, **settings):
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 7, stride=2, padding=3, bias=False),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(6, channels, 3, padding=1, bias=False),
        torch.nn.AvgPool2d(3, 1, 1, count_include_pad=counted),
    )
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if name.startswith("1.") and value.is_floating_point():
                value.uniform_(0.5, 2)
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    params = {"BatchNorm_0": {"scale": state["1.weight"], "bias": state["1.bias"]}}
    for name, key in (("Conv_0", "0.weight"), ("Conv_1", "4.weight")):
        params[name] = {"kernel": state[key].transpose(2, 3, 1, 0)}
    stats = {"BatchNorm_0": {"mean": state["1.running_mean"], "var": state["1.running_var"]}}
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    port = Stem(channels=channels, **settings), {"params": params, "batch_stats": stats}
    return compare(net.eval(), port, (images,), (images.transpose(0, 2, 3, 1),), rounding=channels == 4, gradients=True)


@pytest.mark.parametrize("channels", [5, 4])
def test_a_correct_port_is_equal_where_its_output_has_the_references_shape_too(channels):
    """With 4 channels the output is 4 × 4 × 4 in any order of axes; that of the inputs decides."""
    result = compared(channels=channels)
    assert result.verdict == "equal"
    assert len(result.forward.rearranged) == 1


MISTAKES = {
    "conv": ({"conv": "SAME"}, "conv_general_dilated: padding ((2, 3), (2, 3)) → ((3, 3), (3, 3))"),
    "pool": ({"pool": "SAME"}, "reduce_window_max: padding ((0, 0), (0, 1), (0, 1), (0, 0)) → "),
    "counts": ({"counts": False}, "div: padding counts"),
}


@pytest.mark.parametrize("channels", [5, 4])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_padding_is_the_only_difference(mistake, channels):
    settings, repair = MISTAKES[mistake]
    result = compared(channels=channels, **settings)
    (defect,) = result.forward.defects
    assert line_of(mistake) in (*defect.lines, *defect.repair.operation.lines)
    assert str(defect.repair).startswith(repair)
    assert result.forward.verified


def test_an_average_that_should_not_count_the_padding():
    (defect,) = compared(counted=False).forward.defects
    assert (line_of("counts"), "div: padding does not count") == (*defect.lines, str(defect.repair))


def test_height_and_width_in_the_other_order_are_a_difference():
    """Channels last, the output transposed: another order of axes than that of the inputs."""
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 4, 3, padding=1).eval()
    weights = {name: p.detach().numpy() for name, p in net.named_parameters()}
    images = np.random.default_rng(0).standard_normal((2, 3, 4, 4))

    def port(order):
        def run(p, x):
            y = jax.lax.conv_general_dilated(x, p["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC"))
            return (y + p["bias"]).transpose(order)

        return run, weights

    verdicts = {
        order: compare(net, port(order), (images,), (images.transpose(0, 2, 3, 1),), rounding=False).verdict
        for order in ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 1, 3))
    }
    assert list(verdicts.values()) == ["equal", "equal", "different"]
