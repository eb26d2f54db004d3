"""One element that is NaN, infinite or wrong on one side alone is a difference, wherever it stands."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinax.compare.capture import trace
from twinax.compare.matching.matching import EXACT, ROUNDED, Side, _transposed, arranged, same_order
from twinax.compare.repair.diagnosis import diagnose
from twinax.compare.rounding import _squared_error

# Around the numbers of elements from which on only a sample is compared first, or no copy is kept.
SIZES = [1, 2, 3, 4, 5, 63, 64, 65, 66, 127, 129, 1023, 1024, 1026, 4095, 4097, 9_999, 10_001, 2**20 - 1, 2**20 + 2]
WRONG = {"NaN": np.nan, "infinite": np.inf, "-infinite": -np.inf, "large": 1e30, "other": 0.123}


@st.composite
def pairs(draw, sizes=SIZES):
    """(array, the same with one other element)."""
    size = draw(st.sampled_from(sizes))
    # the last elements and those around the limits are where a comparison of the first ones alone would miss it
    place = draw(st.one_of(st.integers(0, size - 1), st.integers(max(size - 3, 0), size - 1)))
    values = np.random.default_rng(size).standard_normal(size)
    if draw(st.booleans()):  # others are NaN or infinite on both sides
        values[:: draw(st.integers(2, 7))] = draw(st.sampled_from([np.nan, np.inf, -1e30]))
    other = values.copy()
    other[place] = WRONG[draw(st.sampled_from(sorted(WRONG)))]
    if np.array_equal(values, other, equal_nan=True):
        other[place] = 0.5
    return values, other


@settings(max_examples=150)
@given(pairs())
def test_one_element_is_a_difference_in_every_comparison_of_values(pair):
    values, other = pair
    if not np.isfinite(values).any():
        return
    for bound in (EXACT, ROUNDED):
        assert same_order(values, values.copy(), bound)
        assert not same_order(values, other, bound)
        assert not same_order(other, values, bound)
    assert trace._same(values, values.copy())
    assert not trace._same(values, other)
    assert not trace._same(other, values)
    if not np.array_equal(np.isfinite(values), np.isfinite(other)):
        assert not np.isfinite(_squared_error(other, values))  # which no ratio calls rounding


@settings(max_examples=60)
@given(pairs([size for size in SIZES if size < 10_000]))
def test_one_element_is_a_difference_in_another_order_of_axes(pair):
    values, other = (np.stack([side, side + 0.25]) for side in pair)
    assert not _transposed(values, other.T, EXACT, np.abs(values[np.isfinite(values)]).max(initial=1e-300))
    finite = np.isfinite(pair[0]).all() and np.isfinite(pair[1]).all()
    assert not (finite and arranged(values, other.T, EXACT))


def _function(parameters, x):
    return x * parameters["w"]


@pytest.mark.parametrize("kind", ["NaN", "infinite", "other"])
@pytest.mark.parametrize("size", [2, 5, 64, 65, 200, 5000])
def test_an_output_with_one_wrong_element_is_different(size, kind):
    """As an output, and through every step from the trace to the verdict."""
    weights = {"w": np.random.default_rng(0).standard_normal(size)}
    x = (np.random.default_rng(1).standard_normal((3, size)),)
    mask = np.zeros((3, size), bool)
    mask[-1, -1] = True

    def wrong(parameters, x):
        return jnp.where(mask, WRONG[kind], _function(parameters, x))

    assert diagnose((_function, weights), (_function, weights), x).verdict == "equal"
    assert diagnose((_function, weights), (wrong, weights), x).verdict == "different"
    assert diagnose((wrong, weights), (_function, weights), x).verdict == "different"
    assert diagnose((wrong, weights), (wrong, weights), x).verdict == "equal"


@pytest.mark.parametrize("size", [4, 65, 300])
def test_values_that_differ_in_one_element_are_no_partners(size):
    values = np.random.default_rng(0).standard_normal(size)
    other = values.copy()
    other[-1] = np.nan
    one = trace.Trace("JAX", values=[values])
    side = Side(one)
    for array in (other, np.r_[values[:-1], 0.5]):
        candidate = Side(trace.Trace("JAX", values=[array]))
        signature = candidate.by_number.get(0)  # none: too few numbers to identify it
        assert signature is None or not list(side.partners(signature, array))
    assert list(side.partners(side.by_number[0], values.copy())) == [0]


@pytest.mark.parametrize("fill", [-1e9, -1e4, float(np.finfo(np.float32).min)])
def test_masks_that_overlap_do_not_hide_a_difference(fill):
    """Scores to which two masks were added have two fill values."""
    scores = np.random.default_rng(0).standard_normal((3, 5, 5))
    masks = np.triu(np.full((5, 5), fill), 1) + fill * (np.arange(5) > 3)
    assert same_order(scores + masks, scores * (1 + 1e-13) + masks, EXACT)
    assert not same_order(scores + masks, scores * 1.001 + masks, ROUNDED)


def test_whole_numbers_are_compared_exactly():
    numbers = np.array([3_000_000_000, 5], np.int64)
    assert same_order(numbers, numbers.copy(), EXACT)
    assert not same_order(numbers, numbers + 1, ROUNDED)


def test_a_loss_of_zero_decides_nothing():
    weights = {"w": np.ones(3)}
    zero = (lambda p, x: jnp.maximum(x * p["w"] - 9, 0).sum()), weights
    assert diagnose(zero, zero, (np.ones(3),)).reason == "the outputs are 0; pass inputs for which they are not"
