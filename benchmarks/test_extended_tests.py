"""The list of extended cases: its rule, its names, and that no planted mistake is left to it."""

import ast
import xml.etree.ElementTree as ET
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.extended_tests import KEPT, SECONDS, extended, times
from benchmarks.pages import read_rows

ROOT = Path(__file__).parents[1]
LIST = (ROOT / "tests" / "extended.txt").read_text(encoding="utf-8").splitlines()

_names = st.sampled_from([f"tests/{file}.py::test_{test}" for file in "ab" for test in "xy"])
_cases = st.one_of(_names, st.builds("{}[{}]".format, _names, st.integers(0, 3)))


@given(seconds=st.dictionaries(_cases, st.floats(0, 3)), catching=st.sets(_cases))
def test_a_case_is_extended_by_its_time_and_what_it_catches(seconds, catching):
    cases = extended(seconds, catching)
    for case, time in seconds.items():
        others = [other for other in seconds if other != case and other.partition("[")[0] == case.partition("[")[0]]
        is_quickest = bool(others) and all((time, case) < (seconds[other], other) for other in others)
        stands_for_its_test = is_quickest and catching.isdisjoint({case, *others})
        assert (case in cases) == (time > SECONDS and case not in catching and not stands_for_its_test)


def test_whole_runs_are_not_extended():
    assert extended({KEPT[0]: 100.0, "tests/test_a.py::test_b": 100.0}, ()) == ["tests/test_a.py::test_b"]


def test_times_have_the_names_of_pytest(tmp_path):
    case = ET.Element("testcase", classname="tests.cli.test_demo", name="test_a[b.c-1]", time="1.5")
    suites = ET.Element("testsuites")
    ET.SubElement(suites, "testsuite").append(case)
    ET.ElementTree(suites).write(tmp_path / "report.xml")
    assert times(tmp_path / "report.xml") == {"tests/cli/test_demo.py::test_a[b.c-1]": 1.5}


def test_the_list_names_tests_that_exist():
    """A test that was renamed runs again, and its old name must leave the list."""
    assert LIST
    tests = {}
    for file in {case.partition("::")[0] for case in LIST}:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        tests[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [case for case in LIST if case.split("::")[1].partition("[")[0] not in tests[case.split("::")[0]]] == []


def test_every_planted_mistake_is_caught_without_the_list():
    rows = read_rows(ROOT / "docs" / "measurements" / "mutations.md", "mutations")
    assert {row[2] for row in rows} & {*LIST} == set()
