"""Tables in the pages of docs: printed, and written between the marks of their name."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def write_table(page: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, and writes it into a page between the marks `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        ValueError: the page does not have each mark once.
    """
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    write_between(page, name, "\n".join(lines))


def write_between(page: Path, name: str, text: str) -> None:
    """Replaces what stands in a page between a name's marks. Raises: ValueError as `marks` does."""
    begin, end = marks(page, name)
    before = page.read_text()
    page.write_text(f"{before.split(begin)[0]}{begin}\n{text}\n{end}{before.split(end)[1]}")


def marks(page: Path, name: str) -> tuple[str, str]:
    """The two marks of a table. Raises: ValueError where the page does not have each once."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text()
    if (text.count(begin), text.count(end)) != (1, 1):
        raise ValueError(f"{page}: must have {begin} and {end}, each once")
    return begin, end
