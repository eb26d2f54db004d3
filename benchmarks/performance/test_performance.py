"""The programs that the benchmark compares do the same work, and its tables hold what was measured."""

import os
from functools import partial

import numpy as np
import pytest

from benchmarks.alternating import Program, alternate, spread, started
from benchmarks.performance import performance, training_speed
from benchmarks.performance.training_speed import COMPARED, Size, linen_step, torch_step, twinax_step, update

SIZE = Size("small", 16, 2, 1, 24, 3, 0.0, vocabulary=80, length=8)


def losses_of(make_step, size):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(training_speed, "RATE", 1e-2)  # so that other betas move a loss of so small a model
        step = make_step(size, "float32")
        return [update(step) for _ in range(COMPARED)]


@pytest.fixture(scope="module")
def plain_losses():
    """Step -> its losses without dropout."""
    return {make_step: losses_of(make_step, SIZE) for make_step in (torch_step, twinax_step, linen_step)}


def test_three_updates_have_the_same_losses(plain_losses):
    """The oracle is `torch.nn.Transformer` with Adam: weights, gradients and updates of the others are the same."""
    expected = plain_losses[torch_step]
    assert expected[0] - expected[-1] > 1e-3  # the updates change the loss by far more than the tolerance
    for values in plain_losses.values():
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make_step", [twinax_step, linen_step, torch_step])
def test_dropout_changes_the_losses(make_step, plain_losses):
    dropped_losses = losses_of(make_step, SIZE._replace(dropout=0.3))
    assert np.abs(np.subtract(plain_losses[make_step], dropped_losses)).max() > 0.01


def test_programs_run_in_turn():
    prepare = partial(tuple, ("ready", len))
    with started([Program("a", prepare), Program("b", prepare)], "test") as running:
        assert [program.about for program in running.values()] == ["ready", "ready"]
        seconds, results = alternate(running, 2, "test", "four", repeats=3)
    assert results == {"a": 4, "b": 4}
    assert [len(times) for times in seconds.values()] == [2, 2]
    assert spread([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == "2.00 (1.50 to 4.00)"


def fails(number):
    """End the process that computes."""
    os._exit(number)


def test_a_program_that_fails_in_a_round_is_left_out():
    prepare = partial(tuple, ("ready", abs))
    programs = [Program("a", prepare), Program("b", partial(tuple, ("ready", fails)))]
    with started(programs, "test", together=True) as running:
        seconds, results = alternate(running, 2, "test", 3, together=True)
        assert {name: len(times) for name, times in seconds.items()} == {"a": 2}
        assert results == {"a": 3}
        with pytest.raises((EOFError, OSError)):
            alternate(running, 1, "test", 3)


def test_tables_and_chart(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in performance.NAMES))
    times = {"twinax, float32": [0.1, 0.2], "twinax, int8": [0.1, 0.1], "rival, int8": [0.2, 0.2]}
    results = {label: {"machine": "a machine", "seconds": times} for label in ("small model", "beam 4")}
    performance.write(page, results)
    row = "| rival, int8 | 200 | 1.50 (1.00 to 2.00) | 2.00 (2.00 to 2.00) | a machine |"
    training, decoding = page.read_text().split("<!-- end of training speed -->")
    assert "| small model | twinax, int8 | 100 | 0.75 (0.50 to 1.00) | – | a machine |" in training
    assert f"| small model {row}" in training
    assert f"| beam 4 {row}" in decoding
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
