"""Prints tables and writes them into pages of docs, between marks with their name."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def write_table(page: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and write it into a page between the marks `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        ValueError: the page does not contain each mark exactly once.
    """
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    write_between(page, name, markdown(header, rows))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)


def read_rows(page: Path, name: str) -> list[tuple[str, ...]]:
    """The rows of the table between a name's marks, without its header. Raises: ValueError as `marks` does."""
    begin, end = marks(page, name)
    lines = page.read_text().split(begin)[1].split(end)[0].strip().splitlines()[2:]
    return [tuple(line[2:-2].split(" | ")) for line in lines]


def write_between(page: Path, name: str, text: str) -> None:
    """Replace the text between a name's marks in a page. Raises: ValueError as `marks` does."""
    begin, end = marks(page, name)
    old_text = page.read_text()
    write_atomically(page, f"{old_text.split(begin)[0]}{begin}\n{text}\n{end}{old_text.split(end)[1]}")


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file: other processes read the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def marks(page: Path, name: str) -> tuple[str, str]:
    """The two marks of a table. Raises: ValueError if the page does not contain each exactly once."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text()
    if (text.count(begin), text.count(end)) != (1, 1):
        raise ValueError(f"{page}: must contain {begin} and {end} exactly once")
    return begin, end
