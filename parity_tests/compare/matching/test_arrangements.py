"""Layouts are found from values: any chain of reshapes, transpositions, flips and slices, and no other arrangement."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twinax.compare.matching.arrangements import find_layout

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@st.composite
def arrangements(draw):
    """(source with distinct numbers, an arrangement of it)."""
    shape = draw(SIZES)
    source = np.arange(int(np.prod(shape))).reshape(shape)
    result = source
    for step in draw(st.lists(st.sampled_from(["transpose", "flip", "take", "split", "flatten"]), max_size=4)):
        axis = draw(st.integers(0, max(result.ndim - 1, 0)))
        if step == "transpose":
            result = result.transpose(draw(st.permutations(range(result.ndim))))
        elif step == "flip" and result.ndim:
            result = np.flip(result, axis)
        elif step == "take" and result.ndim > 1:
            result = result.take(draw(st.integers(0, result.shape[axis] - 1)), axis)
        elif step == "split" and result.ndim and result.shape[axis] == 4:
            result = result.reshape(*result.shape[:axis], 2, 2, *result.shape[axis + 1 :])
        elif step == "flatten" and result.ndim > 1 and axis:
            result = result.reshape(*result.shape[: axis - 1], -1, *result.shape[axis + 1 :])
    return source, result


@given(arrangements())
@settings(max_examples=200)
def test_every_arrangement_of_axes_is_found(arrangement):
    """`apply`, the steps and the code give the arrangement."""
    source, result = arrangement
    layout = find_layout(result, source.size)
    assert layout is not None
    assert np.array_equal(layout.apply(source), result)
    sizes, index, order, shape = layout.steps
    assert np.array_equal(source.reshape(sizes)[index].transpose(order).reshape(shape), result)
    assert np.array_equal(eval(layout.code("source", source.shape), {"source": source}), result)


@given(arrangements(), st.integers(0, 2**31), st.floats(0.3, 1))
def test_what_is_unknown_is_filled_in(arrangement, seed, share):
    """Where it is found at all; never another arrangement."""
    source, result = arrangement
    known = np.where(np.random.default_rng(seed).random(result.shape) < share, result, -1)
    layout = find_layout(known, source.size)
    assume(layout is not None)
    assert np.array_equal(layout.apply(source), result)


@given(SIZES, st.integers(0, 2**31))
def test_a_shuffle_is_no_arrangement(shape, seed):
    size = int(np.prod(shape))
    shuffled = np.random.default_rng(seed).permutation(size).reshape(shape)
    layout = find_layout(shuffled, size)
    assert layout is None or np.array_equal(layout.apply(np.arange(size)), shuffled)
    if max(shape) >= 5 and size > 8 and layout is not None:
        assert len(layout.axes) <= len(shape)


SOURCE = np.arange(24).reshape(6, 4)
CODES = {
    "w": SOURCE,
    "w.T": SOURCE.T,
    "w.T.reshape(4, 2, 3)": SOURCE.T.reshape(4, 2, 3),
    "w.reshape(3, 8)[1].reshape(2, 4)": SOURCE[2:4],
    "w[:, ::-1]": SOURCE[:, ::-1],
    "w[:, ::-1].T.reshape(4, 2, 3)": SOURCE.reshape(2, 3, 4)[..., ::-1].transpose(2, 0, 1),
    "w[3]": SOURCE[3],
    "w[3, 2]": SOURCE[3, 2],
}


@pytest.mark.parametrize("code", CODES)
def test_code_is_short(code):
    assert find_layout(CODES[code], 24).code("w", SOURCE.shape) == code
