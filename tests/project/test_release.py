"""What a repository has around its code: changelog, citation, CI and forms of the hosting service, promises."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import twinax

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # of Keep a Changelog


def test_the_newest_version_of_the_changelog_is_this_one():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+)\](?: - \d{4}-\d\d-\d\d)?$", text, flags=re.MULTILINE)
    assert len(versions) == text.count("\n## ")
    assert versions[0] == "Unreleased"
    assert versions[1:2] in ([], [twinax.__version__])
    assert {*re.findall(r"^### (.*)", text, flags=re.MULTILINE)} <= GROUPS
    assert re.findall(r"^\[(.+)\]: https://", text, flags=re.MULTILINE) == versions


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        (["twinax/a.py"], 1),
        (["train/b.py", "CHANGELOG.md"], 0),
        (["tests/c.py"], 0),
        (["configs/d.py", "docs/e.md"], 1),
    ],
)
def test_a_change_of_installed_code_needs_a_line_in_the_changelog(changed, status, tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    git("init")
    git("add", ".")
    git("commit", "-m", "base")
    for name in changed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("new\n")
    git("add", ".")
    git("commit", "-m", "change")
    result = subprocess.run([ROOT / ".ci/changelog", "HEAD~1"], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, "Unreleased" in result.stderr) == (status, status == 1), result.stderr


def test_ci_runs_what_is_run_locally():
    commands = [row["command"] for row in WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["include"]]
    commands += [step["run"] for step in STEPS if "run" in step]
    local = re.findall(r"^make .*", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    assert len(local) == 4
    assert {command.replace('"${newest[@]}"', "VERSIONS=newest") for command in local} <= {*commands}


def test_pre_commit_runs_the_checks_of_ci():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["name"] for repository in config["repos"] for hook in repository["hooks"]}
    (lint,), (types,) = (
        re.findall(rf"^{target}: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        for target in ("lint", "types")
    )
    assert hooks == {*re.findall(r"\$\(BIN\)/(ruff \w+|pyright)", lint + types)}


def test_ci_has_few_permissions_and_fixed_actions():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for name, job in WORKFLOW["jobs"].items():
        assert job["timeout-minutes"], name
        assert "permissions" not in job
    for step in STEPS:
        assert "run" in step or re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])


def test_forms_ask_for_what_a_report_needs():
    folder = ROOT / ".github/ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert forms.keys() == {"bug", "config", "question", "wrong_verdict"}
    for name in ("bug", "wrong_verdict"):
        labels = [field["attributes"]["label"] for field in forms[name]["body"]]
        assert "Output of `twinax --version`" in labels
    assert "twinax compare … --json report.json" in (folder / "wrong_verdict.yml").read_text()


def test_the_citation_is_of_this_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["title"] == PROJECT["name"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert "version" not in citation  # twinax.__version__ is the only one


def test_every_address_of_the_repository_is_that_of_the_settings():
    repository = PROJECT["urls"]["Repository"]
    files = [*ROOT.glob("*.md"), ROOT / "CITATION.cff", *(ROOT / ".github").rglob("*.*"), *(ROOT / "docs").glob("*.md")]
    addresses = re.findall(
        r"https://github\.com/[^/\s]+/twinax\b", "".join(p.read_text() for p in files if p.is_file())
    )
    assert {*addresses} == {repository}


def test_every_promise_has_tests_that_exist():
    """Rows of the table: a promise, then tests as pytest names them, after a semicolon those that are slow."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| promise | tests |")[2]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text, flags=re.MULTILINE)
    assert len(rows) > 25
    for promise, tests in rows:
        everyday, slow = (re.findall(r"`([\w/]+\.py)::(\w+)`", part) for part in tests.partition(";")[::2])
        assert everyday, promise
        for file, name in (*everyday, *slow):
            tree = ast.parse((ROOT / file).read_text())
            (test,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
            marks = [ast.unparse(node) for node in (*tree.body, *test.decorator_list)]
            is_slow = any(re.search(r"^pytest\.mark\.slow$|^pytestmark = .*\.slow\b", mark) for mark in marks)
            assert is_slow == ((file, name) in slow), f"{file}::{name}"
