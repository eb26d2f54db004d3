"""The code blocks in README and docs run unchanged."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
# Chinese page -> the English page
TRANSLATIONS = {ROOT / "README.zh-CN.md": ROOT / "README.md"}
TRANSLATIONS |= {page: TUTORIALS / page.name for page in sorted((TUTORIALS / "zh").glob("*.md"))}
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - TRANSLATIONS.keys())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, forks):
    """Each page runs in a separate process, without test settings; a line ending in `# -> text` prints text.

    Blocks that need a trained model, or a file that another block writes, run in the test of the demo or of the
    tutorials.
    """
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    others = ('"runs/', "%%writefile", "import port\n")
    code = "\n".join(block for block in blocks if not any(part in block for part in others))
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


def linked_pages(page, prose):
    """The links of a page, those to a translation as links to its original."""
    for target, heading in re.findall(r"\]\(([^)#]*)(#?[^)]*)\)", prose):
        path = target if target.startswith("https://") else (page.parent / target).resolve()
        yield f"{TRANSLATIONS.get(path, path)}{heading}"


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=lambda page: str(page.relative_to(ROOT)))
def test_both_languages_say_the_same(translation):
    """They have the same code, headings, links, pictures and figures, and link each other."""
    pages = TRANSLATIONS[translation], translation
    code, *lists = [], [], [], [], []
    for page, other in zip(pages, pages[::-1], strict=True):
        text = page.read_text()
        code.append(re.findall(r"```.*?```", text, flags=re.DOTALL))
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert f"]({os.path.relpath(other, page.parent)})" in "\n".join(text.splitlines()[:14])
        lists[0].append(re.findall(r"^#+ ", prose, flags=re.MULTILINE))
        lists[1].append([link for link in linked_pages(page, prose) if link != str(pages[0])])
        lists[2].append([" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose)])
        lists[3].append(re.findall(r"\d+\.\d+", prose))
    assert code[0] == code[1]
    for english, chinese in lists:
        assert sorted(english) == sorted(chinese)
    english, chinese = (Counter(re.findall(r"\d+", re.sub(r"\]\(.*?\)", "", page.read_text()))) for page in pages)
    assert english <= chinese  # which writes more numbers as digits


@pytest.mark.parametrize("page", [*PAGES, *TRANSLATIONS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        linked_page = page.parent / target if target else page
        assert target.startswith("https://") or linked_page.exists(), target
        if heading and not target.startswith("https://"):
            headings = re.findall(r"^#+ (.*)", linked_page.read_text(), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], heading


@pytest.mark.parametrize("page", [*PAGES, *TRANSLATIONS], ids=lambda page: page.name)
def test_programs_exist(page):
    for name in re.findall(r"python -m ((?:benchmarks|parity_tests|tests)[\w.]*\w)", page.read_text()):
        module = ROOT / name.replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), name


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
