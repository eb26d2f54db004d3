"""Both twins are equal for every pair of setting values, in float64 and under jit."""

import numpy as np
import pytest

from parity_tests.support import cases
from twinax.parity.functions import random_arrays, random_batch
from twinax.parity.ladder import compare_models

CASES = cases.pairwise()


EVERYDAY = 7  # cases that have every value, and most pairs; `make test-all` has the rest


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n >= EVERYDAY)) for n in range(len(CASES))]
)
def test_pairwise(number):
    config, inputs = CASES[number]
    rng = np.random.default_rng(number)
    batch = random_batch(config, rng, batch=3, src_length=7, tgt_length=5)
    if inputs["src_mask"]:
        batch = batch._replace(src_mask=rng.random(batch.src_tokens.shape) < 0.7)
    if inputs["tgt_mask"]:
        batch = batch._replace(tgt_mask=rng.random(batch.tgt_tokens.shape) < 0.7)
    if inputs["dropout"]:
        batch = batch._replace(dropout=(number, 7))
    reproduce = f"pytest parity_tests/ladder/test_settings.py -k 'test_pairwise[{number}]'  # {config}"
    compare_models(config, random_arrays(config, number), batch, reproduce=reproduce).check()


def test_every_value_is_tested_every_day():
    for name, values in cases.factors().items():
        tested = [inputs[name] if name in inputs else getattr(config, name) for config, inputs in CASES[:EVERYDAY]]
        assert set(tested) >= set(values), name


def test_every_pair_of_values_meets():
    names = [name for name, values in cases.factors().items() if len(values) > 1]
    pairs = set()
    for config, inputs in CASES:
        values = {name: inputs[name] if name in inputs else getattr(config, name) for name in names}
        pairs |= {(a, values[a], b, values[b]) for a in names for b in names if a < b}
    expected = {
        (a, x, b, y) for a in names for b in names if a < b for x in cases.factors()[a] for y in cases.factors()[b]
    }
    assert not expected - pairs
