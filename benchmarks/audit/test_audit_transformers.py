"""The table of audited models of `transformers`: every class is in it, and a class that cannot be audited fails."""

import re
import shutil
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from benchmarks.audit import audit_transformers
from parity_tests.support import transformers_audit

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "audit.md"


def test_the_command_fails_where_a_class_cannot_be_audited_or_explanations_are_stale(tmp_path, monkeypatch, capsys):
    class Broken:
        def config_class(self=None):
            raise ValueError("no config")

    page = tmp_path / "audit.md"
    shutil.copy(PAGE, page)
    monkeypatch.setattr(audit_transformers, "architectures", lambda: ([Broken], []))
    assert audit_transformers.main(page) == 1
    assert "| Broken |  |  | NOT AUDITED: ValueError: no config |" in page.read_text()
    stderr = capsys.readouterr().err
    assert "Broken: ValueError: no config" in stderr
    assert "not in transformers. Remove it from EXPLAINED" in " ".join(stderr.split())


def test_the_page_has_every_class():
    """Of the version of `transformers` that it names; a newer one may have more."""
    page = PAGE.read_text()
    (version,) = re.findall(r"\(transformers ([\d.]+)\)", page)
    missing = [
        c.__name__
        for classes, cell in zip(transformers_audit.architectures(), ("| {} |", "{}"), strict=True)
        for c in classes
        if cell.format(c.__name__) not in page
    ]
    assert missing == [] or Version(transformers.__version__) > Version(version)


@pytest.mark.slow
def test_every_class(tmp_path):
    shutil.copy(PAGE, tmp_path / "audit.md")
    assert audit_transformers.main(tmp_path / "audit.md") == 0
    assert (tmp_path / "audit.md").read_text() == PAGE.read_text()
