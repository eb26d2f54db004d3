"""Damaged versions of every kind of file that twinax reads: each is read, or refused in one line.

A finding is any other exception, the end of the process, seconds, gigabytes, or changed arrays despite checksums. The
number of a case is its seed, so it can be repeated.
"""

import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

import numpy as np

from tests.support.fuzzing_subjects import SUBJECTS, Subject
from twinax.cli.process.messages import one_line

_MARK = "CASE "  # of a worker's answers among what libraries print
_SECONDS = 20  # of one case
_BYTES = 1 << 30  # by which one case may grow the process
_LENGTH = 1500  # characters of a message
_STRANGE = (
    *(None, True, False, 0, -1, 2**31, 10**9, 10**30, 0.5, -1e308, float("nan"), float("inf")),
    *("", "x", "\x1b[31m", "\ud800", "../../etc/passwd", "/dev/zero", "\0", "a" * 10_000),
    *([], [None], {}, {"": {}}, [[]], [{}], ["\ud800"], {"a": 10**9}),
)
_DEEP = "[" * 100_000  # JSON that is nested too deeply for a recursive parser


class Case(NamedTuple):
    """A damaged version: what was done to which file, and what came of it."""

    name: str
    number: int
    damage: str
    outcome: str  # read, refused; anything else is a finding

    @property
    def is_finding(self) -> bool:
        """Whether twinax neither read nor refused it."""
        return self.outcome not in ("read", "refused")


# ---- damage


def damage(path: Path, rng: np.random.Generator) -> str:
    """Changes a file of a checkpoint, or of a directory of it; returns what was done."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size) if path.is_dir() else [path]
    file = files[rng.integers(len(files))]
    name = file.name if file == path else str(file.relative_to(path))
    content = file.read_bytes()
    if file.suffix in (".json", ".jsonl") and rng.random() < 0.7:
        new, what = damaged_json(content, rng)
    elif content[8:9] == b"{" and rng.random() < 0.5:  # safetensors
        size = 8 + int.from_bytes(content[:8], "little")
        header, what = damaged_json(content[8:size], rng)
        new = len(header).to_bytes(8, "little") + header + content[size:]
    else:
        new, what = damaged_bytes(content, rng)
    file.write_bytes(new)
    return f"{name}: {what}"


def damaged_bytes(content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """(the content with one change, what was done)."""
    start = int(rng.integers(len(content)))
    end = min(len(content), start + 1 + int(rng.exponential(8)))
    kind = int(rng.integers(7))
    if kind == 0:
        bit = int(rng.integers(8))
        return _replaced(content, start, start + 1, bytes([content[start] ^ 1 << bit])), f"bit {bit} of byte {start}"
    if kind == 1:
        return content[:start], f"cut at {start}"
    if kind == 2:
        return _replaced(content, start, end, b""), f"without bytes {start} to {end}"
    if kind == 3:
        return _replaced(content, start, start, content[start:end]), f"bytes {start} to {end} twice"
    if kind == 4:
        return _replaced(content, start, end, bytes(end - start)), f"zeros from {start} to {end}"
    if kind == 5:
        new = rng.bytes(end - start)
        return _replaced(content, start, end, new), f"{new.hex()} at {start}"
    return _replaced(content, start, end, b"\xff" * (end - start)), f"ff from {start} to {end}"


def _replaced(content: bytes, start: int, end: int, new: bytes) -> bytes:
    return content[:start] + new + content[end:]


def damaged_json(content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """(JSON with one value replaced, removed or renamed, what was done)."""
    lines = content.decode().splitlines()
    number = 0
    try:
        document = json.loads(content)
    except ValueError:  # one document per line
        number = int(rng.integers(len(lines)))
        document = json.loads(lines[number])
    holder: Any = [document]
    places = list(_places(holder))
    parent, key = places[rng.integers(len(places))]
    kind, value = int(rng.integers(8)), _STRANGE[rng.integers(len(_STRANGE))]
    what = f"{key!r} becomes {value!r}"[:80]
    if kind == 0 and isinstance(parent, dict):
        del parent[key]
        what = f"without {key!r}"
    elif kind == 1 and isinstance(parent, dict):
        parent[str(value)] = parent.pop(key)
        what = f"{key!r} is named {value!r}"[:80]
    elif kind == 2:
        parent[key] = "DEEP"
        what = f"{key!r} is nested deeply"
    else:
        parent[key] = value
    text = json.dumps(holder[0]).replace('"DEEP"', _DEEP)
    if len(lines) > 1 and number:
        text = "\n".join([*lines[:number], text, *lines[number + 1 :]])
    return text.encode(), what


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all values within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


# ---- outcomes


@dataclass(frozen=True)
class Originals:
    """A valid file or directory of each subject, written when it is first damaged."""

    folder: Path
    content: dict[str, object] = field(default_factory=dict)  # by subject: what is read of it

    def copy(self, name: str) -> Path:
        """A copy of an original, in place of the copy before."""
        original, copy = self.folder / name, self.folder / "copy"
        if name not in self.content:
            original.mkdir()
            SUBJECTS[name].write(original)
            self.content[name] = SUBJECTS[name].read(original)
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(original, copy))

    def damaged(self, name: str, number: int) -> tuple[Path, str]:
        """(a damaged copy, what was done)."""
        copy = self.copy(name)
        return copy, damage(copy, np.random.default_rng([number, *name.encode()]))

    def case(self, name: str, number: int) -> Case:
        """What comes of a damaged version."""
        copy, what = self.damaged(name, number)
        return Case(name, number, what, outcome(SUBJECTS[name], copy, self.content[name]))


def outcome(subject: Subject, folder: Path, original: object) -> str:
    """What comes of reading a damaged version; `original`: what is read of the original."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with _limited(_SECONDS), warnings.catch_warnings(action="ignore"):
            is_same = subject.read(folder) == original
        result = "read" if is_same or not subject.is_verified else "other arrays, and no word about it"
    except TimeoutError:
        result = f"takes more than {_SECONDS} s"
    except BaseException as error:  # libraries in Rust raise PanicException
        result = _refusal(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return result if grown < _BYTES else f"{result}, and needs {grown / 1e9:.1f} GB"


def _refusal(error: BaseException) -> str:
    """`refused`, or what is wrong with the exception."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    line = one_line(str(error))
    if not type(error).__module__.startswith("twinax."):
        return f"{type(error).__name__}: {line[:200]}"
    if not line or len(line) > _LENGTH:
        return f"a message of {len(line):,} characters"
    return "refused"


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*args: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def cases(requests: Sequence[tuple[str, int]]) -> Iterator[Case]:
    """What comes of damaged versions, by subject and number."""
    with tempfile.TemporaryDirectory() as folder:
        originals = Originals(Path(folder))
        yield from (originals.case(name, number) for name, number in requests)


def cases_in_worker(requests: Sequence[tuple[str, int]]) -> Iterator[Case]:
    """As `cases`, in another process, which a reader may end.

    Raises:
        RuntimeError: an original cannot be written or read.
    """
    remaining = list(requests)
    while remaining:
        command = [sys.executable, "-m", "tests.support.fuzzing"]
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin:
                json.dump(remaining, process.stdin)  # the worker reads all of it before it answers
            for line in process.stdout:
                if line.startswith(_MARK):
                    remaining.pop(0)
                    yield Case(*json.loads(line.removeprefix(_MARK)))
        if process.returncode == 1:
            raise RuntimeError(f"{remaining[0][0]}: the original cannot be written or read")
        if process.returncode:
            yield Case(*remaining.pop(0), "unknown", f"ends the process with status {process.returncode}")


if __name__ == "__main__":
    for case in cases(json.load(sys.stdin)):
        print(_MARK + json.dumps(case), flush=True)
