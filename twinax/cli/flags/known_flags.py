"""The flags that a command has; one that it lacks is one line, with the most similar flag."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

import tyro

from ..usage import UsageError
from .foreign_flags import FOREIGN, describe_foreign

_EVERYWHERE = ("--help", "--no-verify", "--verbose")
_FLAG = re.compile(r"-+(?!inf|nan)[a-z]", re.IGNORECASE)  # -inf is a value


def flags_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """The flags that tyro makes of the fields of a dataclass."""
    for field, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        base = hint.__origin__ if marks else hint
        name = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), field).replace("_", "-")
        if is_dataclass(base):
            yield from flags_of(base, f"{prefix}{name}." if name else prefix)
        elif tyro.conf.Positional not in marks:
            yield f"--{prefix}{name}"
            yield from (alias for mark in marks for alias in getattr(mark, "aliases", None) or ())
            if base is bool and tyro.conf.FlagCreatePairsOff not in marks:
                yield f"--{prefix}no-{name}"


def check_known(command: str, kind: Any, words: Sequence[str], others: Sequence[str] = ()) -> None:
    """Raises: UsageError at a flag that is neither of the dataclass `kind` nor one of `others`."""
    known = {*flags_of(kind), *others, *_EVERYWHERE}
    end = words.index("--") if "--" in words else len(words)
    for word in words[:end]:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in ("-h", "--help") or flag.startswith("--tyro-"):
            return
        if _FLAG.match(word) and flag not in known:  # __de__ is a value
            line = f"{word.partition('=')[0]}: there is no such flag; twinax {command} --help lists them"
            raise UsageError(line + "".join(_suggestions(command, flag, known)))


def _suggestions(command: str, flag: str, known: set[str]) -> Iterator[str]:
    foreign = FOREIGN.get(command, {})
    names = known | foreign.keys()
    anagrams = [name for name in names if sorted(name) == sorted(flag)]  # of --to-pk, --top-p is as similar as --top-k
    for name in get_close_matches(flag, anagrams or names, 1):
        answer = foreign.get(name, name)
        yield f"; did you mean {answer}?" if answer in known else f"; {describe_foreign(command, name)}"
