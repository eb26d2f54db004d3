"""What the pages name is there after `import twinax` alone, in a new process."""

import importlib.util
import re
from pathlib import Path

import twinax

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = "audit|configs|convert|flax_transformer|formulas|parity|presets|published|torch_reference|train"
FILES = re.compile(r"..|json|jsonl|npz|png|svg")  # endings of files


def names():
    """The dotted names of modules, classes and functions in the pages."""
    for page in PAGES:
        for name in re.findall(rf"(?<![\w/.])(?:twinax\.)?((?:{FOLDERS})(?:\.[A-Za-z_]\w*)+)", page.read_text()):
            if not FILES.fullmatch(name.split(".")[1]):
                yield name


def test_every_name_in_the_pages_needs_no_other_import(forks):
    found = sorted({*names()})
    assert len(found) > 20
    code = f"""
import twinax
for name in {found}:
    value = twinax
    for part in name.split("."):
        value = getattr(value, part)
"""
    result = forks(code)
    assert result.returncode == 0, result.stderr


def test_what_is_not_there_raises():
    for module in (twinax, twinax.train, twinax.convert, twinax.convert.layouts):
        assert not hasattr(module, "nothing")
        assert importlib.util.find_spec(f"{module.__name__}.nothing") is None
