"""The test of a port: an assertion with the lines that differ, and GitHub's annotations of these lines."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .capture.source_lines import file_of
from .comparison import Comparison, Convert, compare
from .repair.defect import Defect
from .report import grouped, places, show_findings

_WIDTH = 100  # of the message
_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY_ESCAPES = {**_ESCAPES, ":": "%3A", ",": "%2C"}


class DifferentFunctionError(AssertionError):
    """Two models are not the same function; `comparison` is what was found."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison
        text = io.StringIO()
        show_findings(comparison, Console(file=text, width=_WIDTH))
        super().__init__(f"{headline(comparison)}\n{text.getvalue()}".strip())


def assert_same_function(
    reference: Any,
    candidate: Any,
    inputs: Sequence[Any],
    candidate_inputs: Sequence[Any] | None = None,
    *,
    convert: Convert | None = None,
    gradients: bool = False,
    optimizers: tuple[Any, Any] | None = None,
    dropout: bool = False,
) -> None:
    """For tests of a port: compares two models as `compare` does.

    Raises:
        DifferentFunctionError: an AssertionError: they are not equal on these inputs, or an output has another shape;
            the message has the lines and the repairs.
        CaptureError: a model cannot be traced, or the converter fails.
        TypeError: an optimizer is neither optax's nor torch's.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    models = (reference, candidate, inputs, candidate_inputs)
    comparison = compare(*models, convert=convert, gradients=gradients, optimizers=optimizers, dropout=dropout)
    if not comparison.ok or comparison.forward.rearranged:
        raise DifferentFunctionError(comparison)


def headline(comparison: Comparison) -> str:
    """One line: the verdict, and the first difference of those that were found."""
    groups = [group for _, group in _groups(comparison)]
    if not groups:
        return comparison.forward.reason or comparison.verdict
    further = f", and {len(groups) - 1} more" if len(groups) > 1 else ""
    return f"{comparison.verdict}: {' and '.join(groups[0][0].lines)}: {_text(groups[0])}{further}"


def annotations(comparison: Comparison, root: Path) -> list[str]:
    """The differences as commands that GitHub shows at their lines; files are relative to `root`.

    Source: GitHub, "Workflow commands for GitHub Actions", setting an error message.
    """
    commands = []
    for part, group in _groups(comparison):
        place = next((line for line in group[0].lines if line.rpartition(":")[2].isdigit()), "")
        file, _, number = place.rpartition(":")
        path = file_of(file) if file else None
        properties = {} if path is None else {"file": os.path.relpath(path, root), "line": number}
        commands.append(_command(f"{part} differ by {group[0].error:.1g}: {_text(group)}", properties))
    sentences = [f"optimizer: {difference}" for difference in comparison.update or ()]
    sentences += [str(entry) for entry in comparison.rounding if not entry.failure and not entry.ok]
    sentences += [f"output {sentence}" for sentence in comparison.forward.rearranged]
    if not commands and not sentences and not comparison.ok:
        sentences = [headline(comparison)]
    return commands + [_command(sentence, {}) for sentence in sentences]


def on_github() -> Path | None:
    """The folder of the repository if this process runs in a GitHub workflow."""
    return Path(os.environ.get("GITHUB_WORKSPACE", ".")) if os.environ.get("GITHUB_ACTIONS") == "true" else None


def _groups(comparison: Comparison) -> list[tuple[str, list[Defect]]]:
    """The differences, with the part that differs."""
    parts = (("outputs", comparison.forward), ("gradients", comparison.backward))
    return [(part, group) for part, diagnosis in parts if diagnosis for group in grouped(diagnosis.defects)]


def _text(group: Sequence[Defect]) -> str:
    first = group[0]
    reference = ", ".join(places(first.reference)) or ", ".join(o.name for o in first.reference)
    text = first.note or (str(first.repair) if first.repair is not None else f"differs from {reference}")
    return f"{text} ({len(group)} times)" if len(group) > 1 else text


def _command(message: str, properties: dict[str, str]) -> str:
    values = {**properties, "title": "twinax compare"}
    text = ",".join(f"{name}={_escaped(value, _PROPERTY_ESCAPES)}" for name, value in values.items())
    return f"::error {text}::{_escaped(message, _ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return text.translate(str.maketrans(escapes))
