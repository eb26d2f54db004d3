"""The comparison harness on functions outside the package."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinax.parity import Criterion, compare_arrays

CLOSE = Criterion("all", 1e-12, "array", "the same formula twice")


def softmax_torch(x):
    return {"probabilities": torch.softmax(torch.from_numpy(x), -1), "parts": [torch.from_numpy(x).exp()]}


def softmax_jax(x):
    exp = jnp.exp(x)
    return {"probabilities": exp / exp.sum(-1, keepdims=True), "parts": [exp]}


def test_any_two_functions():
    x = np.random.default_rng(0).normal(size=(3, 5))
    report = compare_arrays(softmax_torch, softmax_jax, x, criteria=[CLOSE])
    assert report.ok
    assert [finding.path for finding in report.findings] == ["probabilities", "parts.0"]
    assert str(report) == "equal: 2 arrays within their tolerances"


@given(row=st.integers(0, 2), column=st.integers(0, 4), change=st.floats(1e-9, 1) | st.just(float("nan")))
def test_names_the_element_that_differs(row, column, change):
    x = np.ones((3, 5))
    y = x.copy()
    y[row, column] += change
    report = compare_arrays({"a": {"b": x}}, {"a": {"b": y}}, criteria=[CLOSE], reproduce="make it so")
    assert not report.ok
    assert report.failed_rung == "all"
    finding = report.worst("all")
    assert (finding.path, finding.index, finding.reference) == ("a.b", (row, column), 1.0)
    text = str(report)
    for part in (f"a.b[{row}, {column}]", "reference 1.0", "tolerance 1e-12", "the same formula twice", "make it so"):
        assert part in text
    with pytest.raises(AssertionError, match=r"a\.b\["):
        report.check()


def test_first_rung_follows_the_criteria_and_first_array_the_computation():
    def report_of(early, late):
        reference, candidate = {"late": 1.0, "early": 1.0}, {"late": late, "early": early}
        rung_of = {"early": "all", "late": "later"}.__getitem__
        return compare_arrays(
            reference, candidate, criteria=[CLOSE, Criterion("later", 0.0, "one", "exact")], rung_of=rung_of
        )

    report = report_of(early=2.0, late=2.0)
    assert report.failed_rung == "all"
    assert report.first.path == "late"
    assert "computation order: late" in str(report)
    assert report_of(early=1.0, late=2.0).failed_rung == "later"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, "the candidate has no such array"),
        ({"x": np.ones(2), "y": np.ones(1)}, "y: the reference has no such array"),
        ({"x": np.ones((2, 1))}, r"shapes differ: reference [2], candidate [2, 1]"),
    ],
)
def test_arrays_that_cannot_be_compared(other, message):
    report = compare_arrays({"x": np.ones(2)}, other, criteria=[CLOSE])
    assert not report.ok
    assert message in str(report)


def test_nothing_to_compare_is_no_proof():
    report = compare_arrays({}, {}, criteria=[CLOSE])
    assert not report.ok
    with pytest.raises(AssertionError, match="nothing was compared"):
        report.check()


@pytest.mark.parametrize(("scale", "tolerance"), [("one", 0.1), ("array", 1.0), ("rung", 10.0)])
def test_scales(scale, tolerance):
    criteria = [Criterion("all", 0.1, scale, "because")]
    reference = {"x": np.array([-10.0, 1.0]), "y": np.array([100.0])}
    assert compare_arrays(
        reference, {**reference, "x": np.array([-10.0, 1.0 + 0.99 * tolerance])}, criteria=criteria
    ).ok
    assert not compare_arrays(
        reference, {**reference, "x": np.array([-10.0, 1.0 + 1.01 * tolerance])}, criteria=criteria
    ).ok


def test_booleans_and_empty_arrays():
    exact = [Criterion("all", 0.0, "one", "exact")]
    mask = np.array([True, False])
    assert compare_arrays(
        {"m": mask, "e": np.ones((0, 3))}, {"m": jnp.asarray(mask), "e": np.ones((0, 3))}, criteria=exact
    ).ok
    assert not compare_arrays({"m": mask}, {"m": ~mask}, criteria=exact).ok


@pytest.mark.parametrize("scale", ["one", "array", "rung"])
def test_infinities_and_nan(scale):
    criteria = [Criterion("all", 1e-12, scale, "because")]
    infinite = np.array([np.inf, 1.0])
    assert compare_arrays({"x": infinite}, {"x": infinite.copy()}, criteria=criteria).ok
    for values in ([3.0, 1.0], [np.inf, 5.0], [-np.inf, 1.0], [np.nan, 1.0]):
        assert not compare_arrays(
            {"x": infinite, "y": np.ones(1)}, {"x": np.array(values), "y": np.ones(1)}, criteria=criteria
        ).ok
    assert not compare_arrays({"x": np.array([np.nan])}, {"x": np.array([np.nan])}, criteria=criteria).ok


def test_large_integers_are_not_rounded():
    exact = [Criterion("all", 0.0, "one", "exact")]
    assert not compare_arrays({"x": np.array([2**53])}, {"x": np.array([2**53 + 1])}, criteria=exact).ok


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"x": 1j}, "only real arrays"),
        ({"x": None}, "only real arrays"),
        ({"a.b": 1, "a": {"b": 2}}, "two arrays with the path a.b"),
    ],
)
def test_trees_that_cannot_be_compared(tree, message):
    with pytest.raises(ValueError, match=message):
        compare_arrays(tree, tree, criteria=[CLOSE])


def test_wrong_criteria():
    with pytest.raises(ValueError, match="at least one criterion"):
        compare_arrays({}, {}, criteria=[])
    with pytest.raises(ValueError, match="rung_of returns other, for which there is no criterion"):
        compare_arrays({"x": 1.0}, {"x": 1.0}, criteria=[CLOSE], rung_of=lambda path: "other")
