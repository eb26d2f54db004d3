"""The first bytes of files in the formats of other projects. Nothing is executed, and at most 96 MiB are read."""

import pickletools
import struct
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from ...configs.json_text import parse_json

HEAD = 4096  # bytes that identify most formats
_LIMIT = 16 << 20  # bytes of a pickle; a safetensors header may have six times as many
_GGUF_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING = 8
_LEGACY_PICKLES = 5  # in a file of PyTorch before 1.6: magic number, version, system, content, names of storages


def read_head(path: Path, size: int = HEAD) -> bytes:
    """The first bytes of a file."""
    with open(path, "rb") as file:
        return file.read(size)


def safetensors_header(path: Path) -> dict[str, Any] | None:
    """The JSON header of a safetensors file, None if it has none or it is damaged."""
    head = read_head(path, 9)
    size = int.from_bytes(head[:8], "little")
    if head[8:] != b"{" or not 2 <= size <= _LIMIT * 6:
        return None
    try:
        header = parse_json(read_head(path, 8 + size)[8:])
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def safetensors_size(path: Path) -> int | None:
    """The number of bytes that the header of a safetensors file states, None if it has no valid header."""
    header = safetensors_header(path)
    if header is None:
        return None
    try:
        data = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        return 8 + int.from_bytes(read_head(path, 8), "little") + int(data)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def gguf_metadata(head: bytes) -> dict[str, Any]:
    """The metadata of a GGUF file up to its first array, with its `version`."""
    metadata: dict[str, Any] = {}
    try:
        _, metadata["version"], _, count = struct.unpack_from("<4sIQQ", head)
        position = 24
        for _ in range(count):
            name, position = _gguf_text(head, position)
            (kind,) = struct.unpack_from("<I", head, position)
            position += 4
            if kind == _GGUF_STRING:
                metadata[name], position = _gguf_text(head, position)
            elif kind in _GGUF_VALUES:
                (metadata[name],) = struct.unpack_from(f"<{_GGUF_VALUES[kind]}", head, position)
                position += struct.calcsize(_GGUF_VALUES[kind])
            else:
                break
    except (struct.error, IndexError, OverflowError):
        pass
    return metadata


def _gguf_text(head: bytes, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", head, position)
    end = position + 8 + length
    if end > len(head):
        raise IndexError("the text ends beyond the header")
    return head[position + 8 : end].decode("utf-8", "replace"), end


def marian_types(path: Path) -> set[int] | None:
    """The numbers of the tensor types in marian-conv's binary format, None if a file is not in it."""
    head = read_head(path, 1 << 20)
    version, count = (int.from_bytes(head[start : start + 8], "little") for start in (0, 8))
    if version != 1 or not 0 < count < 1 << 14 or len(head) < 16 + 32 * count:
        return None
    names = head[16 + 32 * count :]
    if not any(name in names for name in (b"special:model.yml\0", b"Wemb\0")):
        return None
    return {int.from_bytes(head[start : start + 8], "little") for start in range(24, 16 + 32 * count, 32)}


def zip_names(path: Path) -> list[str] | None:
    """The names in a zip archive, None if a file is not a complete one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception:  # a damaged file can raise anything
        return None


def pickled_names(path: Path) -> tuple[list[str], set[str]]:
    """(the classes and functions that a PyTorch file or a pickle refers to, its other strings)."""
    names: list[str] = []
    texts: set[str] = set()
    try:
        for name, text in _references(pickle_of(path)):
            if name not in (None, *names):
                names.append(str(name))
            texts |= {text} if text else set()
    except Exception:  # a damaged file can raise anything
        pass
    return names, texts


def pickle_of(path: Path, limit: int = _LIMIT) -> bytes:
    """The first bytes of the pickle in a PyTorch file, which has the names of its entries; empty if there is none."""
    try:
        if not zipfile.is_zipfile(path):  # before PyTorch 1.6
            return read_head(path, limit)
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                return file.read(limit)
    except Exception:  # a damaged file can raise anything, such as zlib.error or EOFError
        return b""


def _references(content: bytes) -> Iterator[tuple[str | None, str | None]]:
    """(name of a class or function, None) or (None, another string) of each opcode, in the order of the file."""
    stream = BytesIO(content)
    for _ in range(_LEGACY_PICKLES):
        memo: dict[int, str] = {}
        recent = ["", ""]  # the last two strings on the stack
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument).replace(" ", "."), None
            elif opcode.name == "STACK_GLOBAL":
                yield ".".join(recent), None
            elif isinstance(argument, str):
                recent = [recent[1], argument]
                yield None, argument
            elif opcode.name == "MEMOIZE":
                memo[len(memo)] = recent[1]
            elif opcode.name in ("BINGET", "LONG_BINGET") and argument in memo:
                recent = [recent[1], memo[int(str(argument))]]
