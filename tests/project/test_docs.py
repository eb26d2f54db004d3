"""The code blocks in README and docs run unchanged."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = [*sorted({*ROOT.glob("*.md")} - {READMES[1]}), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, forks):
    """Each page runs in a separate process, without test settings; a line ending in `# -> text` prints text.

    Blocks that need a trained model run in the test of the demo or of the tutorials.
    """
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    code = "\n".join(block for block in blocks if '"runs/' not in block and not block.startswith("%%"))
    if not code:
        return
    result = forks(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == re.findall(r"# -> (.*)", code)


def test_failures_of_a_process_are_seen(forks, tmp_path):
    """Or a page that raises would pass; each process starts afresh."""
    failed = forks("print(1); module = 2; raise ValueError('no')")
    assert (failed.returncode, failed.stdout) == (1, "1\n")
    assert failed.stderr.endswith("ValueError: no\n")
    assert forks("import sys; sys.exit(3)").returncode == 3
    assert forks("import os; os.kill(os.getpid(), 9)").returncode == -9
    assert "NameError" in forks("module").stderr
    passed = forks("import os, sys; print(os.getcwd(), sys.argv[1], os.environ['A'])", "b", cwd=tmp_path, A="c")
    assert passed == (0, f"{tmp_path} b c\n", "")


def test_the_readmes_say_the_same():
    """Both languages have the same code, headings, links, pictures and figures."""
    blocks, prose = [], []
    for page in READMES:
        text = page.read_text()
        blocks.append(re.findall(r"```.*?```", text, flags=re.DOTALL))
        prose.append(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert blocks[0] == blocks[1]
    for pattern in (r"^#+ ", r"\]\((?!README)([^)]+)\)", r"\d+\.\d+", r"`([^`]+)`"):
        english, chinese = (re.findall(pattern, text, flags=re.MULTILINE) for text in prose)
        english, chinese = (sorted(" ".join(match.split()) for match in matches) for matches in (english, chinese))
        assert english == chinese, pattern


@pytest.mark.parametrize("page", [*PAGES, READMES[1]], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        linked_page = page.parent / target if target else page
        assert target.startswith("https://") or linked_page.exists(), target
        if heading and not target.startswith("https://"):
            headings = re.findall(r"^#+ (.*)", linked_page.read_text(), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], heading


def test_make_help_lists_every_target():
    (targets,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, flags=re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]  # a make that runs this test would print the directory
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = [line.split(maxsplit=1) for line in output.splitlines()]
    assert sorted(target for target, _ in listed) == sorted(targets.split())


def test_every_measurement_has_a_page_that_another_links():
    pages = {page.name for page in (ROOT / "docs" / "measurements").glob("*.md")}
    assert pages >= {*re.findall(r"docs/measurements/([\w-]+\.md)", MAKEFILE)}
    links = re.findall(r"measurements/([\w-]+\.md)", "".join(page.read_text() for page in PAGES))
    assert pages == {*links}
