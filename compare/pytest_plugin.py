"""pytest: pages of failed comparisons for `@pytest.mark.comparison_report`, and annotations in a GitHub workflow.

pytest imports this file whenever twinax is installed, so it imports nothing until a comparison has failed.
"""

import json
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_MARKER = (
    "comparison_report(folder='comparisons'): write the HTML page and the JSON document of a failed "
    "`assert_same_function` to the folder"
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Write the page of a failed comparison, and keep its annotations in the report, which may come from a worker."""
    report = yield
    testing = sys.modules.get("twinax.compare.testing")  # else no comparison was made
    error: Any = call.excinfo.value if call.excinfo is not None else None
    if testing is None or not isinstance(error, testing.DifferentFunctionError):
        return report
    marker = item.get_closest_marker("comparison_report")
    if marker is not None:
        folder = next(iter(marker.args), marker.kwargs.get("folder", "comparisons"))
        page = _write(error.comparison, item.config.rootpath / folder, item.nodeid)
        report.sections.append(("comparison", f"page: {page}"))
    root = testing.on_github()
    report.comparison_annotations = [] if root is None else testing.annotations(error.comparison, root)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the annotations at the beginning of lines, where GitHub reads them."""
    for report in terminalreporter.getreports("failed"):
        for line in getattr(report, "comparison_annotations", ()):
            terminalreporter.write_line(line)


def _write(comparison: Any, folder: Path, nodeid: str) -> Path:
    """The path of the page; the document lies beside it."""
    from .page import page
    from .report import as_document

    path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', nodeid).strip('-')}.html"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(page(comparison, ("the reference", "the candidate")), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(as_document(comparison)) + "\n", encoding="utf-8")
    return path
