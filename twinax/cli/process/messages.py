"""Error output of a command: one line per failure. The traceback of an unexpected exception is saved to a file."""

import re
import sys
import tempfile
import traceback
from io import TextIOWrapper
from typing import TextIO

from ...configs.printing import escape

_SHOWN = 3  # problems of a list
_LENGTH = 2000  # characters
_WORD = re.compile(r"(\S{200})\S{200,}")
DEFECT = 70  # exit status, EX_SOFTWARE of sysexits.h

_shows_all = False


def set_encoding_errors(errors: str, *streams: TextIO) -> None:
    """Set what happens to characters that the encoding of a stream lacks."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def show_all(on: bool) -> None:
    """Set whether `one_line` shows all problems of a list."""
    global _shows_all
    _shows_all = on


def one_line(message: str) -> str:
    """A message on one line: of its indented lines, which list problems, the first three and their number.

    After `show_all`, all lines.
    """
    lines = [escape(line) for line in message.splitlines() if line.strip()] or [""]
    if _shows_all:
        return "\n".join(lines)
    lines = [_WORD.sub(r"\1…", line) for line in lines]  # a value from a file may be long
    problems = [line.strip() for line in lines[1:] if line.startswith(" ")]
    remarks = [line.strip() for line in lines[1:] if not line.startswith(" ")]
    more = [f"and {len(problems) - _SHOWN} more, which --verbose lists"] if problems[_SHOWN:] else []
    rest = "; ".join((*problems[:_SHOWN], *more, *remarks))
    line = lines[0].strip() + ((" " if lines[0].endswith(":") else "; ") + rest if rest else "")
    return line if len(line) <= _LENGTH else f"{line[:_LENGTH]}… (--verbose shows everything)"


def describe_defect(error: Exception) -> str:
    """One line on an unforeseen exception, whose traceback is saved."""
    reason = one_line(f"{type(error).__name__}: {error}")[:300]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="twinax-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{' '.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}")
        place = f"the traceback is in {file.name}; please report it"
    except OSError as problem:
        place = f"the traceback cannot be saved: {problem.strerror}"
    return f"this is a defect of twinax: {reason}; {place}"
