"""Each known mistake fails at its expected rung, and the healthy model passes."""

import pytest

from parity_tests.mutations import ladder_mistakes


@pytest.mark.parametrize("mistake", ladder_mistakes.MISTAKES, ids=lambda mistake: mistake.name)
def test_seen(mistake):
    assert ladder_mistakes.run(mistake).failed_rung == mistake.rung


def test_healthy_model_and_no_traces_of_mistakes():
    for mistake in ladder_mistakes.MISTAKES:
        with mistake.applied():
            pass
    ladder_mistakes.run(None).check()
