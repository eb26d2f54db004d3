"""The report of an audit: one answer per question, with a measurement, a location and the consequences."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from ..backend.notebook import result_html


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    ok: bool | None  # None: it could not be measured
    measured: str
    where: str = ""  # first part of the model with the defect
    breaks: str = ""  # consequences of the defect
    question: str = ""  # set by `audit`


@dataclass(frozen=True)
class Mistake:
    """A setting that is a known mistake."""

    setting: str  # such as field='value'
    repaired: str  # the repaired setting
    breaks: str  # consequences of the mistake


@dataclass(frozen=True)
class Audit:
    """All answers about a model."""

    name: str
    answers: tuple[Answer, ...]
    mistakes: tuple[Mistake, ...] = ()
    dtype: str = "float64"  # dtype of the measurements
    dtype_reason: str = ""  # reason why it is not float64

    @property
    def findings(self) -> tuple[Answer, ...]:
        """The answers that show a defect."""
        return tuple(answer for answer in self.answers if answer.ok is False)

    @property
    def ok(self) -> bool:
        """Whether there are neither findings nor known mistakes."""
        return not self.findings and not self.mistakes

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if self.ok:
            return "no defects"
        return f"failed checks: {len(self.findings)}, known mistakes: {len(self.mistakes)}"

    @property
    def dtype_line(self) -> str:
        """The reason why the dtype is not float64, in one line; empty for float64."""
        return f"audited in {self.dtype}: {self.dtype_reason}" if self.dtype_reason else ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}"]
        lines += [f"  {self.dtype_line}"] if self.dtype_line else []
        for answer in self.findings:
            location = f", first in {answer.where}" if answer.where else ""
            lines.append(f"  {answer.question} No: {answer.measured}{location}. {answer.breaks}")
        lines += [f"  {m.setting}: {m.breaks}; repaired by {m.repaired}" for m in self.mistakes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(a.question, a.measured, a.where, a.breaks) for a in self.findings]
        rows += [(m.setting, f"repaired by {m.repaired}", "", m.breaks) for m in self.mistakes]
        columns = ("finding", "measured", "first in", "what it breaks")
        return result_html(f"{self.name}: {self.verdict}", self.ok, columns, rows)

    def document(self) -> dict[str, Any]:
        """The report as JSON values."""
        lists = {name: [asdict(value) for value in getattr(self, name)] for name in _LISTS}
        return {"name": self.name, "ok": self.ok, "dtype": self.dtype, "dtype_reason": self.dtype_reason, **lists}

    def tables(self) -> list[Table]:
        """The report as tables for a terminal."""
        names = ("question", "", "measured", *["first in"] * any(answer.where for answer in self.answers))
        answers = Table(*_columns(names), title=f"audit of {self.name}", title_justify="left")
        for answer in self.answers:
            row = answer.question, _VERDICTS[answer.ok], escape(answer.measured), escape(answer.where)
            answers.add_row(*row[: len(names)])
        if not self.mistakes:
            return [answers]
        columns = _columns(("setting", "repaired", "what it breaks"))
        mistakes = Table(*columns, title="known mistakes", title_justify="left")
        for mistake in self.mistakes:
            mistakes.add_row(escape(mistake.setting), escape(mistake.repaired), escape(mistake.breaks))
        return [answers, mistakes]


def _columns(names: Iterable[str]) -> list[Column]:
    return [Column(name, overflow="fold") for name in names]


_LISTS = ("answers", "mistakes")
_VERDICTS = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "–"}
