"""A bar is drawn on a terminal alone. Elsewhere, and in a notebook, progress is lines without control codes."""

import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import nbclient
import nbformat
import pytest

SHOW = """
from rich.console import Console
from twinax.train.tracking.progress import TrainingProgress, progress_bar, spinner

with progress_bar() as show:
    show("reading", 1, 2)
with spinner("compiling"):
    pass
with TrainingProgress(Console(stderr=True), 0, 9) as progress:
    for update in range(1, 4):
        progress.advance(update, 1.5, 1e-3, 100)
    progress.say("a line")
"""
NO_NOTEBOOK = {"JPY_PARENT_PID": None, "FORCE_COLOR": None, "TERM": "xterm"}


def has_bar(text):
    """Whether a text has control codes other than colors and ends of lines."""
    return "\x1b" in re.sub(r"\x1b\[[\d;]*m", "", text) or "\r" in text.replace("\r\n", "\n")


def on_a_terminal(code, environment):
    """What a process prints to a terminal."""
    here, there = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=there, stdout=there, stderr=there, env=environment)
    os.close(there)
    printed = b""
    with suppress(OSError):  # at the end of the process
        while data := os.read(here, 65536):
            printed += data
    os.close(here)
    assert process.wait() == 0, printed
    return printed.decode()


@pytest.mark.parametrize(
    ("variables", "draws"), [({}, True), ({"JPY_PARENT_PID": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_terminal(variables, draws):
    environment = {name: value for name, value in (os.environ | NO_NOTEBOOK | variables).items() if value is not None}
    printed = on_a_terminal(SHOW, environment)
    assert has_bar(printed) == draws
    assert "a line" in printed


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_a_file(variables, forks):
    """CI and notebooks set FORCE_COLOR, with which rich takes a file for a terminal."""
    finished = forks(SHOW, **NO_NOTEBOOK | variables)
    assert not has_bar(finished.stderr)
    assert finished == (0, "", "a line\n")


def test_a_notebook(tmp_path):
    """In the kernel's process, and in commands that a cell runs, with and without a terminal."""
    (tmp_path / "show.py").write_text(SHOW)
    sources = (SHOW, f"!{sys.executable} show.py", f"%%bash\n{sys.executable} show.py")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells:
        printed = "".join(output.text if "text" in output else output.data["text/plain"] for output in cell.outputs)
        assert "a line" in printed, cell.source
        assert not has_bar(printed), cell.source


def test_no_other_module_draws():
    root = Path(__file__).parents[2]
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    drawing = [path for path in paths if re.search(r"\.status\(|\b(Progress|Live|Spinner)\(", path.read_text())]
    assert drawing == [root / "train" / "tracking" / "progress.py"]
