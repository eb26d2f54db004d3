"""The installed pytest plugin as users have it: a readable failure, its page, and GitHub's annotation."""

import json
import re

import pytest

TESTS = """
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from twinax.compare import assert_same_function

MODULE = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.ReLU()).eval()
WEIGHTS = {name: tensor.detach().numpy() for name, tensor in MODULE.named_parameters()}
X = np.random.default_rng(0).standard_normal((4, 6))


def port(p, x):
    y = x @ p["0.weight"].T + p["0.bias"]
    return jnp.tanh(y)


@pytest.mark.comparison_report("pages")
def test_same():
    assert_same_function(MODULE, (port, WEIGHTS), (X,))


@pytest.mark.comparison_report
def test_other_failures():
    assert port is None


def test_equal():
    assert_same_function(MODULE, MODULE, (X,))
"""
LINE = TESTS.splitlines().index("    return jnp.tanh(y)") + 1
RUN = "import sys, pytest; sys.exit(pytest.main(['--strict-markers', '-p', 'no:cacheprovider']))"


@pytest.fixture(scope="module")
def finished(forks, tmp_path_factory):
    """(folder, lines of the output) of the tests in a workflow."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "test_port.py").write_text(TESTS)
    result = forks(RUN, cwd=folder, CI="true", GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(folder))
    assert (result.returncode, "2 failed, 1 passed" in result.stdout) == (1, True), result.stdout
    return folder, result.stdout.splitlines()


def test_the_failure_is_the_line_that_differs(finished):
    folder, lines = finished
    difference = f"different: {folder.name}/test_port.py:{LINE}: tanh → relu"
    assert any(difference in line for line in lines if line.startswith("FAILED test_port.py::test_same"))
    output = "\n".join(lines)
    assert ">       assert_same_function(MODULE, (port, WEIGHTS), (X,))" in output
    assert "raise DifferentFunctionError" not in output  # the comparison's own code


def test_the_page_is_written_where_the_marker_says(finished):
    folder, lines = finished
    page, document = folder / "pages" / "test_port.py-test_same.html", folder / "pages" / "test_port.py-test_same.json"
    assert sorted((folder / "pages").iterdir()) == [page, document]
    assert f"page: {page}" in lines
    assert "tanh → relu" in page.read_text(encoding="utf-8")
    assert json.loads(document.read_text(encoding="utf-8"))["verdict"] == "different"
    assert not (folder / "comparisons").exists()  # no comparison failed in the other test


def test_github_shows_the_line(finished):
    (line,) = [line for line in finished[1] if line.startswith("::")]
    properties = rf"::error file=test_port\.py,line={LINE},title=twinax compare"
    assert re.fullmatch(properties + r"::outputs differ by [\d.e-]+: tanh → relu", line)
