"""The user's cache of encoded corpora: what it holds, and how it is emptied."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...backend.cache_directory import cache_directory
from ...backend.errors import DataError
from .store import INDEX, LOCK, read_index


class CachedCorpus(NamedTuple):
    """A store in the cache."""

    name: str
    pairs: int | None  # None: it is not complete
    size: int  # bytes


def cached_corpora() -> Iterator[CachedCorpus]:
    """What the cache holds."""
    for folder in _folders():
        try:
            index = read_index(folder)
            yield CachedCorpus(index["name"], sum(kept for _, kept in index["shards"]), _size(folder))
        except DataError:
            incomplete = not (folder / INDEX).is_file()
            yield CachedCorpus(folder.name if incomplete else f"{folder.name} (damaged)", None, _size(folder))


def clear_corpora() -> tuple[int, list[str]]:
    """Remove all stores, tokenizers and counts; return (bytes removed, the stores that a process is writing)."""
    removed, kept = 0, []
    for folder in _folders():
        with (folder / LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                kept.append(folder.name)
                continue
            removed += _size(folder)
            shutil.rmtree(folder)
    for name in ("contents", "tokenizers"):
        removed += _size(cache_directory(name))
        shutil.rmtree(cache_directory(name), ignore_errors=True)
    return removed, kept


def _folders() -> list[Path]:
    root = cache_directory("corpora")
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
