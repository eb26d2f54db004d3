"""Pages of the documentation that commands write."""

from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import settings_page
from benchmarks.pages import write_table
from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig

ROOT = Path(__file__).parents[1]


def test_the_table_goes_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n")
    write_table(page, "x", ("a", "b"), [("1", "2")])
    assert page.read_text() == "before\n<!-- x -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- end of x -->\nafter\n"
    with pytest.raises(ValueError, match="must contain <!-- y --> and <!-- end of y --> exactly once"):
        write_table(page, "y", ("a",), [])


def test_the_page_of_settings_is_what_the_configs_say():
    """`make settings` writes the page."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page.page()
    for kind in (TransformerConfig, TrainingConfig):
        assert [setting.name for setting in settings_page.settings_of(kind)] == [f.name for f in fields(kind)]
