"""The source code around lines that a trace names, as far as the files can be found and read."""

import linecache
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

_CONTEXT = 2  # lines before and after
_MOST = 24  # lines of one file


@dataclass(frozen=True)
class SourceLine:
    """A line of a file; `named`: whether the trace names it."""

    number: int
    text: str
    named: bool


@dataclass(frozen=True)
class Snippet:
    """Lines of one file in order; between two of them others may be left out."""

    file: str  # as the trace names it: the folder and the file
    lines: tuple[SourceLine, ...]


def snippets(lines: Iterable[str]) -> list[Snippet]:
    """The code around these `folder/file.py:number`; none for modules, and for names that several files have."""
    numbers: dict[str, list[int]] = {}
    for line in lines:
        file, _, number = line.rpartition(":")
        if file and number.isdigit():
            numbers.setdefault(file, []).append(int(number))
    return [snippet for file, named in numbers.items() if (snippet := _snippet(file, named)).lines]


def surroundings(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """file -> number -> text of the lines that are shown around these `folder/file.py:number`."""
    numbers: dict[str, set[int]] = {}
    for line in lines:
        file, _, number = line.rpartition(":")
        if file and number.isdigit():
            numbers.setdefault(file, set()).update(range(int(number) - _CONTEXT, int(number) + _CONTEXT + 1))
    texts = {file: linecache.getlines(str(path)) for file in numbers if (path := file_of(file)) is not None}
    return {
        file: {str(n): text[n - 1].rstrip("\n") for n in sorted(numbers[file]) if 1 <= n <= len(text)}
        for file, text in texts.items()
    }


def file_of(name: str) -> Path | None:
    """The file that a trace names `folder/file.py`; None if it is not known, or if several have this name."""
    same_name = [path for path in _files() if path.endswith(name.rpartition("/")[2])]
    paths = {Path(path).resolve(): path for path in same_name if "/".join(Path(path).parts[-2:]) == name}
    return Path(next(iter(paths.values()))) if len(paths) == 1 else None


def _snippet(file: str, named: list[int]) -> Snippet:
    path = file_of(file)
    text = linecache.getlines(str(path)) if path is not None else []
    shown = sorted({n for number in named for n in range(number - _CONTEXT, number + _CONTEXT + 1)})
    shown = [n for n in shown if 1 <= n <= len(text)][:_MOST]
    code = dedent("".join(text[n - 1].rstrip() + "\n" for n in shown)).splitlines()
    return Snippet(file, tuple(SourceLine(n, line, n in named) for n, line in zip(shown, code, strict=True)))


def _files() -> Iterator[str]:
    """The files of all imported modules, and the cells of a notebook."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str):
            yield path
    yield from list(linecache.cache)
