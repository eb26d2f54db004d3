"""Mutations: patches of the source, applied to a copy of the package to test the checks."""

import ast
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_REPORT = ROOT / "build" / "suite.xml"  # the seconds of each test, which `make extended-tests` writes
_TIMEOUT = 900.0  # seconds: a mistake that makes a check hang is caught too
_FAILED, _PASSED = 1, 0  # exit statuses of pytest
_PARSING = threading.Lock()  # Python 3.11 shares the recursion depth of ast.parse between threads


class MutationError(Exception):
    """A patch does not apply, or its checks do not run."""


@dataclass(frozen=True)
class Mutation:
    """Replaces `old`, which occurs once in `place`, by `new`.

    `place`: the dotted name of a module, class or function; or the path of a file that is not Python, as a template.
    """

    name: str
    place: str
    old: str
    new: str
    checks: tuple[str, ...]  # tests, as pytest names them

    def apply(self, package: Path) -> tuple[Path, str]:
        """(file, its text with the mistake) in a copy of the package.

        Raises:
            MutationError: `place` does not exist, `old` does not occur exactly once, or the result is not valid Python.
        """
        with _PARSING:
            return self._apply(package)

    def _apply(self, package: Path) -> tuple[Path, str]:
        path, names = _module(package, self.place)
        text = path.read_text(encoding="utf-8")
        start, end = _region(text, names, self.place)
        if (count := text[start:end].count(self.old)) != 1:
            raise MutationError(f"{self.name}: {self.old!r} occurs {count} times in {self.place}, not once")
        mutated_source = text[:start] + text[start:end].replace(self.old, self.new) + text[end:]
        try:
            ast.parse(mutated_source if path.suffix == ".py" else "")  # of another file, nothing is known
        except SyntaxError as error:
            raise MutationError(f"{self.name}: {self.place} is no longer valid Python: {error}") from None
        return path, mutated_source


@dataclass(frozen=True)
class Verdict:
    """The result of a mutation."""

    mutation: Mutation
    caught_by: str | None  # the first failing test; None if all pass
    seconds: float
    problem: str = ""  # why the checks could not run

    def __str__(self) -> str:
        return self.caught_by or self.problem or "SURVIVED"


def copy_package(folder: Path) -> Path:
    """Copies the installed layout of the package into the folder and returns its `twinax` directory.

    The library of the tests is copied beside it, as `parity_tests.support`.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for name, source in {**settings["package-dir"], "parity_tests.support": "parity_tests/support"}.items():
        target = folder.joinpath(*name.split("."))
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return folder / "twinax"


def run(mutation: Mutation, package: Path) -> Verdict:
    """Applies the mutation to a copy of the package, runs its checks and restores the source.

    Raises:
        MutationError: the mutation does not apply.
    """
    path, mutated_source = mutation.apply(package)
    original = path.read_bytes()
    path.write_text(mutated_source, encoding="utf-8")
    start = time.monotonic()
    try:
        status, output = check(mutation.checks, package, _TIMEOUT)
    finally:
        path.write_bytes(original)
    seconds = time.monotonic() - start
    if status == _PASSED:
        return Verdict(mutation, None, seconds)
    failed_tests = [
        line.removeprefix("FAILED ").partition(" - ")[0] for line in output.splitlines() if "FAILED" in line[:6]
    ]
    if status is None:
        return Verdict(mutation, "hangs", seconds)
    if status != _FAILED or not failed_tests:
        return Verdict(mutation, None, seconds, f"its checks do not run: {' '.join(output.split())[-200:]}")
    return Verdict(mutation, failed_tests[0], seconds)


def check(tests: tuple[str, ...], package: Path, timeout: float | None = None) -> tuple[int | None, str]:
    """Runs tests on a copy of the package; returns (exit status, or None after a timeout; output).

    The quickest run first if their times are known: `make test` has to keep those that catch a mistake.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not extended and not slow"]
    options += ["-p", "parity_tests.support"]  # imported before pytest makes a package of the working directory's alone
    command = [sys.executable, "-m", "pytest", *options, *tests]
    # The copy must precede the installed package and the working directory, which has a `twinax` folder.
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONSAFEPATH": "1"}
    environment |= {"QUICKEST_FIRST": str(_REPORT)} if _REPORT.is_file() else {}
    try:
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, ""
    return process.returncode, process.stdout + process.stderr


def _module(package: Path, place: str) -> tuple[Path, list[str]]:
    """(file of the longest module prefix of a dotted name, or of a path; remaining parts of the name)."""
    if (file := package / place).is_file():
        return file, []
    parts = place.split(".")
    root = package.parent if parts[0] == "parity_tests" else package
    for length in range(len(parts), 0, -1):
        module = root.joinpath(*parts[:length])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                return path, parts[length:]
    raise MutationError(f"{place}: there is no such module")


def _region(text: str, names: list[str], place: str) -> tuple[int, int]:
    """(start, end) offsets of a class or function in a text; the whole text if `names` is empty."""
    if not names:
        return 0, len(text)
    body, first, last = ast.parse(text).body, 1, text.count("\n") + 1
    for name in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == name), None)
        if node is None or node.end_lineno is None:
            raise MutationError(f"{place}: there is no {name}")
        body, first, last = node.body, node.lineno, node.end_lineno
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[:last]))
