"""A file of translations that an interrupted command continues: FILE.part, renamed to FILE at the end."""

import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import xxhash

from ...configs.json_text import parse_json
from ...convert.io.atomic_io import replace_file
from ..usage import UsageError, is_standard_output


class _Output:
    """Closes its file at the end of a `with` block."""

    _file: BinaryIO

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not sys.stdout.buffer:
            with suppress(OSError):  # of what is still to be flushed: `write` has raised it
                self._file.close()


class ResumableOutput(_Output):
    """Windows of sources and their lines, appended one after the other and synced to disk.

    FILE.part.json states the settings, how many windows are written, a hash of their sources, and their size.

    Raises:
        UsageError: FILE.part is of another command, is in use, or cannot be written.
    """

    def __init__(self, path: str, settings: Mapping[str, Any]):
        self._path = Path(path).resolve() if Path(path).is_symlink() else Path(path)  # a link stays one
        self._part, self._state = Path(f"{self._path}.part"), Path(f"{self._path}.part.json")
        self._settings = json.loads(json.dumps(settings))
        self._digest, self._windows, size = "", 0, 0
        self._expected: tuple[int, str] = (0, "")  # windows that were written before, and the hash of their sources
        if self._state.is_file():
            self._expected, size = self._read_state()
        elif self._part.exists():
            raise UsageError(f"{self._part}: exists without {self._state.name}; remove it, or name another output")
        self._file = self._part.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(f"{self._part}: another process writes it; wait for it, or name another output") from None
        self._file.truncate(size)  # what was written after the last state
        self._file.seek(0)
        if not self._state.is_file():
            self._write_state()

    def _read_state(self) -> tuple[tuple[int, str], int]:
        """((windows, hash), size of FILE.part)."""
        try:
            state = parse_json(self._state.read_bytes())
            settings, windows, digest, size = (state[name] for name in ("settings", "windows", "sources", "size"))
            if self._part.stat().st_size < size:
                raise ValueError(f"{self._part.name} is shorter than it states")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self._state}: cannot be used ({error}); remove it and {self._part}") from None
        if settings != self._settings:
            names = [name for name in self._settings if settings.get(name) != self._settings[name]]
            raise UsageError(
                f"{self._part}: was begun with other settings ({', '.join(names)}); repeat that command to go on, or "
                f"remove {self._part} and {self._state}"
            )
        return (windows, digest), size

    def has(self, sources: Sequence[str]) -> bool:
        """Whether the next window was written before. Raises: UsageError if its sources were others then."""
        if self._windows >= self._expected[0]:
            return False
        self._add(sources)
        if self._windows == self._expected[0] and self._digest != self._expected[1]:
            raise UsageError(
                f"{self._part}: was begun with other source lines; remove it and {self._state}, or restore the source"
            )
        return True

    def read(self, number: int) -> list[str]:
        """The next lines that were written before."""
        return [self._file.readline().decode().removesuffix("\n") for _ in range(number)]

    def write(self, sources: Sequence[str], lines: Sequence[str]) -> None:
        """Append the lines of the next window. Raises: UsageError if that fails."""
        self._add(sources)
        try:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._write_state()
        except OSError as error:
            raise UsageError(f"{self._part}: cannot be written: {error.strerror}; the same command goes on") from None

    def finish(self) -> None:
        """Rename to the final name. Raises: UsageError if the source has ended before what was written."""
        if self._windows < self._expected[0]:
            raise UsageError(f"{self._part}: was begun with a longer source; remove it and {self._state}")
        self._file.close()
        self._part.rename(self._path)
        self._state.unlink()

    def _add(self, sources: Sequence[str]) -> None:
        self._windows += 1
        self._digest = xxhash.xxh3_128_hexdigest("\n".join((self._digest, *sources)).encode())

    def _write_state(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        state = {"settings": self._settings, "windows": self._windows, "sources": self._digest, "size": size}
        replace_file(self._state, json.dumps(state, indent=1) + "\n")


class _Stream(_Output):
    """A device or a pipe, to which lines are written as they come."""

    def __init__(self, path: str):
        self._path = Path(path)
        self._file = sys.stdout.buffer if is_standard_output(path) else self._path.open("ab")

    def has(self, sources: Sequence[str]) -> bool:
        """Nothing was written before."""
        return False

    def read(self, number: int) -> list[str]:
        """Nothing was written before."""
        return []

    def write(self, sources: Sequence[str], lines: Sequence[str]) -> None:
        """Write the lines of the next window. Raises: UsageError if that fails."""
        try:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be written: {error.strerror}") from None

    def finish(self) -> None:
        """Close the device or the pipe, so that its reader ends."""
        if self._file is not sys.stdout.buffer:
            self._file.close()


def open_output(path: str, settings: Mapping[str, Any]) -> ResumableOutput | _Stream:
    """A file that is continued after an interruption; or a device or a pipe, which is not. Raises: UsageError."""
    is_file = not Path(path).exists() or Path(path).is_file()
    return ResumableOutput(path, settings) if is_file and not is_standard_output(path) else _Stream(path)
