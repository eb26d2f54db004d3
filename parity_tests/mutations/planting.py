"""A mistake as a patch of the source, and a copy of the package to plant it in."""

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
_TIMEOUT = 900.0  # seconds: a mistake that makes a check hang is caught too
_FAILED, _PASSED = 1, 0  # exit statuses of pytest
_PARSING = threading.Lock()  # Python 3.11 counts the depth of a syntax tree for all threads together


class MutationError(Exception):
    """A patch does not apply, or its checks do not run."""


@dataclass(frozen=True)
class Mutation:
    """A mistake: `old` stands once in `place`, a module, class or function by its dotted name, and becomes `new`."""

    name: str
    place: str
    old: str
    new: str
    checks: tuple[str, ...]  # tests, as pytest names them

    def apply(self, package: Path) -> tuple[Path, str]:
        """(file, its text with the mistake) in a copy of the package.

        Raises:
            MutationError: the place is gone, the text is not there once, or the result is no Python.
        """
        with _PARSING:
            return self._apply(package)

    def _apply(self, package: Path) -> tuple[Path, str]:
        path, within = _module(package, self.place)
        text = path.read_text(encoding="utf-8")
        start, end = _region(text, within, self.place)
        if (times := text[start:end].count(self.old)) != 1:
            raise MutationError(f"{self.name}: {self.old!r} stands {times} times in {self.place}, not once")
        changed = text[:start] + text[start:end].replace(self.old, self.new) + text[end:]
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise MutationError(f"{self.name}: makes no Python of {self.place}: {error}") from None
        return path, changed


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation."""

    mutation: Mutation
    caught_by: str | None  # the first test that fails; None: none does
    seconds: float
    problem: str = ""  # why its checks do not run, where they do not

    def __str__(self) -> str:
        return self.caught_by or self.problem or "SURVIVED"


def copy_package(folder: Path) -> Path:
    """A copy of the package as it is installed, `twinax` within the folder."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for name, source in settings["package-dir"].items():
        target = folder.joinpath(*name.split("."))
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return folder / "twinax"


def run(mutation: Mutation, package: Path) -> Verdict:
    """Plants the mistake in a copy of the package, runs its checks and takes it out again.

    Raises:
        MutationError: it does not apply.
    """
    path, changed = mutation.apply(package)
    healthy = path.read_bytes()
    path.write_text(changed, encoding="utf-8")
    began = time.monotonic()
    try:
        status, output = check(mutation.checks, package, _TIMEOUT)
    finally:
        path.write_bytes(healthy)
    seconds = time.monotonic() - began
    if status == _PASSED:
        return Verdict(mutation, None, seconds)
    failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in output.splitlines() if "FAILED" in line[:6]]
    if status is None:
        return Verdict(mutation, "hangs", seconds)
    if status != _FAILED or not failed:
        return Verdict(mutation, None, seconds, f"its checks do not run: {' '.join(output.split())[-200:]}")
    return Verdict(mutation, failed[0], seconds)


def check(tests: tuple[str, ...], package: Path, timeout: float | None = None) -> tuple[int | None, str]:
    """(exit status of pytest, None after a timeout; its output) of tests of this checkout on a copy of the package."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    # Before the installed package, and not after the working directory, which has a folder of that name.
    environment = os.environ | {
        "PYTHONPATH": str(package.parent),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def _module(package: Path, place: str) -> tuple[Path, list[str]]:
    """(file of the module that a dotted name begins with, the rest of the name)."""
    parts = place.split(".")
    for length in range(len(parts), 0, -1):
        for path in (
            package.joinpath(*parts[:length]).with_suffix(".py"),
            package.joinpath(*parts[:length], "__init__.py"),
        ):
            if path.is_file():
                return path, parts[length:]
    raise MutationError(f"{place}: there is no such module")


def _region(text: str, within: list[str], place: str) -> tuple[int, int]:
    """Where a class or function stands in a text: of no name, all of it."""
    body, first, last = ast.parse(text).body, 1, text.count("\n") + 1
    for name in within:
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == name), None)
        if node is None or node.end_lineno is None:
            raise MutationError(f"{place}: there is no {name}")
        body, first, last = node.body, node.lineno, node.end_lineno
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[:last]))
