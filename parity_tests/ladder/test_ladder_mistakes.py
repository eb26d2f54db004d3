"""Each known mistake fails at its expected rung, and the healthy model passes."""

import pytest

from parity_tests.ladder import mistakes


@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda mistake: mistake.name)
def test_seen(mistake):
    assert mistakes.run(mistake).failed_rung == mistake.rung


def test_healthy_model_and_no_traces_of_mistakes():
    for mistake in mistakes.MISTAKES:
        with mistake.applied():
            pass
    mistakes.run(None).check()
