"""What the results of the project show in a notebook: a verdict and a table, as a piece of HTML."""

from collections.abc import Iterable, Sequence
from html import escape

_CELL = '<{0} style="text-align:left;vertical-align:top">{1}</{0}>'


def result_html(verdict: str, ok: bool, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The verdict, and a table of `rows` if there are any."""
    lines = ["".join(_CELL.format("td", escape(str(cell))) for cell in row) for row in rows]
    color, mark = ("#1a7f37", "✓") if ok else ("#cf222e", "✗")
    html = f'<p><b style="color:{color}">{mark} {escape(verdict)}</b></p>'
    if not lines:
        return html
    head = "".join(_CELL.format("th", escape(column)) for column in columns)
    return f"{html}<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
