"""Writes a store shard by shard: one process at a time, and a killed one is continued where it was."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...backend.errors import DataError
from ...configs.json_text import parse_json
from ...convert.io.atomic_io import replaced_file
from .bpe_dropout import word_starts
from .encoding import Counts, Drop, Encoded, Sides, check_kept, encode_pairs
from .store import INDEX, LOCK, Shard, ShardInfo, StoredPairs, index_of, shard_name, write_shard

KEY = "key.json"  # what a store is of; written first
_PAIRS = 2**18  # read per shard
_QUIET = 30.0  # seconds between two lines of progress
Say = Callable[[str], None]


class Request(NamedTuple):
    """What a store is to hold."""

    name: str  # of the corpus, for messages
    pairs: Iterable[tuple[str, str]]
    total: int  # number of these pairs
    sides: Sides
    key: Mapping[str, Any]  # JSON values that determine the content
    word_starts: bool = False  # for BPE-dropout
    texts: bool = False
    cleaning: Callable[[], Drop] | None = None  # makes what decides about the pairs


def stored_pairs(folder: Path, request: Request, say: Say) -> StoredPairs:
    """The pairs of a request, encoded into a folder unless they are there.

    Raises:
        DataError: all pairs are dropped, or a tokenizer cannot encode one; or the folder is the store of another
            request, is damaged, or cannot be written.
    """
    if not (folder / INDEX).is_file():
        with writing(folder, say):
            if not (folder / INDEX).is_file():
                _check_key(folder, request)
                _write(folder, request, say)
    _check_key(folder, request)
    return StoredPairs(folder)


@contextmanager
def writing(folder: Path, say: Say) -> Iterator[None]:
    """Hold the lock of a folder to write there. Raises: DataError if that is not possible."""
    try:
        with _locked(folder, say):
            yield
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written: {error.strerror or error}; free space or choose another place, by "
            "XDG_CACHE_HOME or by `twinax data --store`, and start again: what is encoded there is kept"
        ) from None


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Hold the lock of a folder; wait for another process that does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it, however the process ends
        except BlockingIOError:
            file.seek(0)
            say(f"waiting for another process that encodes the same corpus ({file.read().strip()})")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a network file system without locks
            say(f"{folder}: cannot be locked ({error.strerror}); another process may encode the same corpus")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _check_key(folder: Path, request: Request) -> None:
    """Write what the folder is the store of. Raises: DataError if it is one of something else."""
    path = folder / KEY
    text = json.dumps(request.key, indent=1, sort_keys=True) + "\n"
    if not path.is_file():
        if foreign := [p.name for p in folder.iterdir() if p.name != LOCK]:
            raise DataError(f"{folder}: is not empty ({foreign[0]}); choose another folder for the store")
        with replaced_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    try:
        earlier = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: is damaged ({error}); remove the folder") from None
    wanted = parse_json(text)
    if earlier != wanted:
        different = [name for name in wanted if not isinstance(earlier, dict) or earlier.get(name) != wanted[name]]
        raise DataError(
            f"{folder}: is the store of another corpus or other settings ({', '.join(different) or 'more settings'} "
            "differ); choose another folder, or remove it"
        )


def _write(folder: Path, request: Request, say: Say) -> None:
    infos = list(_complete_shards(folder))
    counts = Counts()
    for info in infos:
        counts = counts.plus(info.counts)
    if counts.read:
        say(f"{request.name}: {counts.read:,} of {request.total:,} pairs were encoded before")
    drop = None if request.cleaning is None else request.cleaning()
    pairs = islice(iter(request.pairs), counts.read, None)
    begin, last_line, earlier = time.monotonic(), time.monotonic(), counts.read
    while (encoded := encode_pairs(islice(pairs, _PAIRS), request.sides, drop, counts.read)).counts.read:
        starts = _word_starts(request.sides, encoded) if request.word_starts else None
        with replaced_file(folder / shard_name(len(infos))) as temporary:
            info = write_shard(temporary, encoded, counts.read, starts, request.texts)
        infos.append(info)
        counts = counts.plus(info.counts)
        if time.monotonic() - last_line > _QUIET:
            last_line = time.monotonic()
            rate = (counts.read - earlier) / (last_line - begin)
            say(f"{request.name}: {counts.read:,} of {request.total:,} pairs are encoded, {rate:,.0f} per second")
    if not counts.kept:
        _remove(folder)  # else it would refuse the corrected text
    check_kept(counts, request.sides, request.name)
    if counts.read != request.total:
        raise DataError(f"{request.name}: has {counts.read:,} pairs, not {request.total:,}: it has changed")
    with replaced_file(folder / INDEX) as temporary:
        temporary.write_text(index_of(folder, request.name, infos, request.key), encoding="utf-8")


def _remove(folder: Path) -> None:
    """Remove the files of a store without pairs, and its folder if nothing else is there."""
    for path in (*folder.glob("*.arrow"), folder / KEY, folder / LOCK):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _word_starts(sides: Sides, encoded: Encoded) -> list[np.ndarray]:
    """For all ids of each side, whether each begins a word."""
    return [
        word_starts(tokenizer, [pair[i] for pair in encoded.texts], side.sentences())
        for i, (tokenizer, side) in enumerate(zip(sides[:2], encoded.sides, strict=True))
    ]


def _complete_shards(folder: Path) -> Iterator[ShardInfo]:
    """The shards that an earlier process has completed, up to the first one that is missing or damaged."""
    number, first = 0, 0
    while (path := folder / shard_name(number)).is_file():
        try:
            info = Shard.open(path).info
        except DataError:
            return
        if info.first != first:
            return
        yield info
        number, first = number + 1, first + info.counts.read
