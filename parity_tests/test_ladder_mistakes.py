"""Known mistakes are seen, at the rung where they belong, and the healthy model raises no alarm."""

import pytest

from twinax.parity_tests.mutations import ladder_mistakes as mutations


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_seen(mutation):
    assert mutations.run(mutation).failed_rung == mutation.rung


def test_healthy_model_and_no_traces_of_mistakes():
    for mutation in mutations.MUTATIONS:
        with mutation.applied():
            pass
    mutations.run(None).check()
