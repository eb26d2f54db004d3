"""The code in README and docs runs as it stands there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import settings_page
from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [READMES[0], ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, forks):
    """In a process of their own, with nothing of the tests switched on; a line that ends in `# -> text` prints it.

    What needs the demo's model runs in the demo's test.
    """
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    code = "\n".join(block for block in blocks if "runs/demo" not in block)
    if not code:
        return
    done = forks(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"# -> (.*)", code)


def test_the_page_of_settings_is_what_the_configs_say():
    """`make settings` writes it."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page.page()
    for kind in (TransformerConfig, TrainingConfig):
        assert [setting.name for setting in settings_page.settings_of(kind)] == [f.name for f in fields(kind)]


def test_the_readmes_say_the_same():
    """Code, headings, links, pictures and figures; the words between them are in two languages."""
    blocks, rest = [], []
    for page in READMES:
        text = page.read_text()
        blocks.append(re.findall(r"```.*?```", text, flags=re.DOTALL))
        rest.append(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert blocks[0] == blocks[1]
    for pattern in (r"^#+ ", r"\]\((?!README)([^)]+)\)", r"\d+\.\d+", r"`([^`]+)`"):
        ours, theirs = (re.findall(pattern, text, flags=re.MULTILINE) for text in rest)
        assert sorted(" ".join(found.split()) for found in ours) == sorted(" ".join(f.split()) for f in theirs), pattern


@pytest.mark.parametrize("page", [*PAGES, READMES[1]], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
