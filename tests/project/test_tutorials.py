"""The tutorials run as notebooks in an empty folder, and print what their pages show."""

import os
import re
import sys
from pathlib import Path

import jupytext
import nbclient
import pytest

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
_COLORS = re.compile(r"\x1b\[[\d;]*m")
_REDRAWN = re.compile(r"[^\n]*\r(?!\n)")  # a line of another library's progress bar, which the next one replaces


def shown_outputs(page):
    """What the page shows of the output of each code cell: a line per `# -> text`, and the ```text blocks after it.

    In a block, … stands for any text of a line.
    """
    outputs = []
    for language, code in re.findall(r"```(python|bash|text)\n(.*?)```", page, flags=re.DOTALL):
        if language == "text":
            outputs[-1] += code.splitlines()
        else:
            outputs.append(re.findall(r"# -> (.*)", code))
    return outputs


def missing_lines(shown, printed):
    """The shown lines that were not printed, in this order."""
    remaining = iter(printed)
    patterns = (".*".join(map(re.escape, line.rstrip().split("…"))) for line in shown)
    return [p for p in patterns if not any(re.fullmatch(p, line.rstrip()) for line in remaining)]


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_run_as_notebooks(path, tmp_path, monkeypatch):
    """Without the set-up of tests, but offline and on a CPU."""
    folder = tmp_path / "tutorial"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("XLA_FLAGS", "COLUMNS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = shown_outputs(path.read_text())
    assert len(cells) == len(shown)
    for cell, lines in zip(cells, shown, strict=True):
        streams = ("".join(o.text for o in cell.outputs if o.get("name") == name) for name in ("stderr", "stdout"))
        printed = _COLORS.sub("", "\n".join(streams))
        assert "\x1b" not in printed, cell.source
        assert missing_lines(lines, _REDRAWN.sub("", printed).splitlines()) == [], cell.source


def test_a_line_that_was_not_printed_is_missing():
    (lines,) = shown_outputs("```bash\nx\n```\n\ntext\n\n```text\na … c\nd\n```\n")
    assert missing_lines(lines, ["a b c", "x", "d "]) == []
    assert missing_lines(lines, ["d", "a b c"]) == ["d"]
    assert missing_lines(lines, ["a b", "d"]) == ["a\\ .*\\ c", "d"]
