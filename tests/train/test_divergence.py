"""The last healthy checkpoint before a loss that is not finite."""

import numpy as np
import pytest

from twinax.train.loop.divergence import last_healthy


@pytest.mark.parametrize(
    ("losses", "checkpoints", "expected"),
    [
        ([5, 4, 3, 2, 9, 9], [2, 4, 6], 4),
        ([5, 4, 3, 2, 2.1, 2.1], [2, 4, 6], 6),
        ([5, 4], [], None),
        ([], [2], None),
    ],
)
def test_the_last_healthy_checkpoint(losses, checkpoints, expected, monkeypatch):
    monkeypatch.setattr("twinax.train.loop.divergence._WINDOW", 2)
    records = [{"update": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    assert last_healthy(records, checkpoints) == expected


@pytest.mark.parametrize(("rising", "expected"), [(0, 300), (3, 200), (60, 200)])
def test_a_checkpoint_whose_last_losses_rise_is_not_healthy(rising, expected):
    noise = np.random.default_rng(0).normal(0, 0.4, 300)  # that of a single batch is no rise
    losses = [2.0 + x for x in noise[rising:]] + [9.0] * rising
    records = [{"update": update, "loss": loss} for update, loss in enumerate(losses, 1)]
    assert last_healthy(records, [100, 200, 300]) == expected


def test_of_a_descending_loss_too():
    def healthy(losses, checkpoints):
        return last_healthy([{"update": i, "loss": loss} for i, loss in enumerate(losses, 1)], checkpoints)

    descending = [9 - 0.07 * i for i in range(90)]
    assert healthy([*descending, *[2.5] * 10], [50, 90, 100]) == 100
    assert healthy([*descending, *[2.5] * 5, *[12.0] * 5], [50, 90, 100]) == 90
    assert healthy([*[9 - 0.05 * i for i in range(100)], *[4.0] * 97, *[9.0] * 3], [100, 200]) == 100
    assert healthy([2.0, float("inf"), 2.0], [3]) == 3
