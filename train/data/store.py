"""Encoded pairs on disk: shards in Arrow's format, whose memory-mapped arrays are read pair by pair.

A store is a folder of shards and of index.json, which is written last. Each sentence has a checksum, which is compared
whenever it is read, because comparing all of them at every start would take minutes for a large corpus.

Letters: P pairs.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from ...backend.errors import DataError
from ...configs.json_text import parse_json
from ...convert.io.checksums import checksum_of_json
from .buckets import Bucket
from .encoding import Counts, Encoded

FORMAT = 1  # of the pairs of a part
INDEX, LOCK = "index.json", "lock"
_METADATA = b"twinax"
_REMEDY = "remove this folder, so that the next start encodes the corpus again, or copy the folder again"


class ShardInfo(NamedTuple):
    """What a shard says of itself."""

    first: int  # number of the first pair that was read for it
    counts: Counts
    largest_ids: tuple[int, int]  # of source and target; -1 without pairs

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "ShardInfo":
        """From JSON."""
        src, tgt = document["largest_ids"]
        return cls(int(document["first"]), Counts.of(document["counts"]), (int(src), int(tgt)))

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**self._asdict(), "counts": self.counts._asdict()}


class _Side(NamedTuple):
    """The sentences of one side of a shard."""

    ids: np.ndarray
    starts: np.ndarray  # (P + 1,)
    checksums: np.ndarray  # (P,)
    word_starts: np.ndarray | None  # for each id, whether it begins a word

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        """(ids, word starts) of a sentence."""
        part = slice(self.starts[i], self.starts[i + 1])
        return self.ids[part], None if self.word_starts is None else self.word_starts[part]


def _checksum(ids: np.ndarray, word_starts: np.ndarray | None) -> int:
    number = xxhash.xxh32_intdigest(ids.data)
    return number if word_starts is None else xxhash.xxh32_intdigest(word_starts.data, number)


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"{number:05}.arrow"


def write_shard(
    path: Path,
    encoded: Encoded,
    first: int,
    word_starts: Sequence[np.ndarray] | None = None,
    with_texts: bool = False,
) -> ShardInfo:
    """Write a file, not atomically; `word_starts`: for all ids of each side, whether they begin a word."""
    columns = {}
    for side, (name, (ids, starts)) in enumerate(zip(("src", "tgt"), encoded.sides, strict=True)):
        ids = ids.astype(np.uint16) if ids.max(initial=0) < 2**16 else ids
        sentences = _Side(ids, starts, np.empty(0), None if word_starts is None else word_starts[side])
        columns[name] = _lists(starts, sentences.ids)
        columns[f"{name}_checksum"] = pa.array(
            np.array([_checksum(*sentences.of(i)) for i in range(len(starts) - 1)], np.uint32)
        )
        if sentences.word_starts is not None:
            columns[f"{name}_word_starts"] = _lists(starts, sentences.word_starts)
        if with_texts:
            columns[f"{name}_text"] = pa.array([pair[side] for pair in encoded.texts], pa.large_string())
            columns["number"] = pa.array(first + np.array(encoded.indices, np.int64))
    src, tgt = (int(side.ids.max(initial=-1)) for side in encoded.sides)
    info = ShardInfo(first, encoded.counts, (src, tgt))
    batch = pa.RecordBatch.from_pydict(columns, metadata={_METADATA: json.dumps(info.document()).encode()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return info


def _lists(starts: np.ndarray, values: np.ndarray) -> pa.Array:
    if starts[-1] < 2**31:
        return pa.ListArray.from_arrays(starts.astype(np.int32), values)
    return pa.LargeListArray.from_arrays(starts, values)


class Shard(NamedTuple):
    """A shard whose arrays are memory-mapped."""

    sides: tuple[_Side, _Side]
    info: ShardInfo
    batch: pa.RecordBatch

    @classmethod
    def open(cls, path: Path) -> "Shard":
        """Raises: DataError if the file is damaged, as far as that shows without reading every id."""
        try:
            with pa.memory_map(str(path)) as file:
                batch = pa.ipc.open_file(file).get_batch(0)
            batch.validate(full=True)  # else a damaged size would make the process read beyond the file
            info = ShardInfo.of(parse_json(batch.schema.metadata[_METADATA]))
            sides = _side_of(batch, "src"), _side_of(batch, "tgt")
            if {len(side.starts) - 1 for side in sides} != {info.counts.kept}:
                raise ValueError("has another number of pairs than it says")
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: is damaged ({' '.join(str(error).split())[:200]}); {_REMEDY}") from None
        return cls(sides, info, batch)


def _side_of(batch: pa.RecordBatch, name: str) -> _Side:
    """Raises: ValueError if the starts of the sentences cannot be."""
    column = batch.column(name)
    starts = column.offsets.to_numpy()
    ids = column.values.to_numpy(zero_copy_only=True)
    if starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
        raise ValueError(f"the sentences of {name} have no order")
    words = None
    if f"{name}_word_starts" in batch.schema.names:
        words = batch.column(f"{name}_word_starts").values.to_numpy(zero_copy_only=True)
    return _Side(ids, starts, batch.column(f"{name}_checksum").to_numpy(zero_copy_only=True), words)


class StoredPairs:
    """P pairs of a store, the same in every epoch, whose ids are read when they are asked for.

    Raises:
        DataError: the store is incomplete, damaged, or of another version of twinax.
    """

    is_varying = False

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        self.counts = Counts.of(self.index["counts"])
        self.largest_ids: tuple[int, int] = tuple(self.index["largest_ids"])
        self._shards: list[Shard] = []
        for number, (size, kept) in enumerate(self.index["shards"]):
            path = folder / shard_name(number)
            actual = path.stat().st_size if path.is_file() else 0
            if actual != size:
                raise DataError(f"{path}: has {actual:,} bytes, not {size:,}: it is incomplete; {_REMEDY}")
            shard = Shard.open(path)
            if shard.info.counts.kept != kept:
                raise DataError(f"{path}: belongs to another store; {_REMEDY}")
            self._shards.append(shard)
        self._ends = np.cumsum([shard.info.counts.kept for shard in self._shards])
        self.lengths = self._lengths()

    def __reduce__(self) -> tuple[Callable[[Path], "StoredPairs"], tuple[Path]]:
        return StoredPairs, (self.folder,)  # a worker process maps the files itself

    def __len__(self) -> int:
        return len(self.lengths)

    def epoch(self, number: int, buckets: Sequence[Bucket]) -> "StoredPairs":
        """The pairs of an epoch: all."""
        return self

    def _lengths(self) -> np.ndarray:
        """(P, 2): number of tokens that the encoder and the decoder read."""
        parts = [[np.diff(side.starts) for side in shard.sides] for shard in self._shards]
        longest = max((int(side.max(initial=0)) for part in parts for side in part), default=0)
        lengths = np.empty((int(self._ends[-1]), 2), np.uint16 if longest < 2**16 else np.int32)
        for (src, tgt), end in zip(parts, self._ends, strict=True):
            rows = slice(end - len(src), end)
            lengths[rows, 0], lengths[rows, 1] = src, tgt - 1
        return lengths

    def sources(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the sources of these pairs. Raises: DataError if one is damaged."""
        return [ids for ids, _ in self._sentences(rows, 0)]

    def targets(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Ids of the targets of these pairs, start and end included. Raises: DataError if one is damaged."""
        return [ids for ids, _ in self._sentences(rows, 1)]

    def word_starts(self, rows: Iterable[int], side: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, whether each begins a word) of these sentences. Raises: DataError if one is damaged."""
        sentences = self._sentences(rows, side)
        return [(ids, starts) for ids, starts in sentences if starts is not None]

    @property
    def has_word_starts(self) -> bool:
        """Whether the store knows which ids begin a word."""
        return all(side.word_starts is not None for shard in self._shards for side in shard.sides)

    def _sentences(self, rows: Iterable[int], side: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
        numbers = np.fromiter(rows, np.int64)
        places = np.searchsorted(self._ends, numbers, "right")
        sentences = []
        for row, place in zip(numbers.tolist(), places.tolist(), strict=True):
            shard = self._shards[place]
            i = row - int(self._ends[place]) + shard.info.counts.kept
            ids, word_starts = shard.sides[side].of(i)
            if _checksum(ids, word_starts) != shard.sides[side].checksums[i]:
                path = self.folder / shard_name(place)
                raise DataError(f"{path}: pair {i} does not match its checksum, it is damaged; {_REMEDY}")
            sentences.append((ids, word_starts))
        return sentences

    def texts(self, number: int) -> list[tuple[str, str]]:
        """The texts of the kept ones of the first pairs that were read, of a store that has texts."""
        columns = ("number", "src_text", "tgt_text")
        batches = ([shard.batch.column(name).to_pylist() for name in columns] for shard in self._shards)
        return [(src, tgt) for batch in batches for i, src, tgt in zip(*batch, strict=True) if i < number]

    def fingerprint(self) -> str:
        """A hash of all ids; the same corpus and tokenizers give the same hash."""
        return self.index["fingerprint"]


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a store. Raises: DataError if there is none, or it is damaged, or of another version."""
    path = folder / INDEX
    if not path.is_file():
        raise DataError(f"{folder}: has no {INDEX}; it is not a complete store of `twinax data --store`; {_REMEDY}")
    return read_checked(path, _REMEDY)


def read_checked(path: Path, remedy: str, formats: Sequence[int] = (FORMAT,)) -> dict[str, Any]:
    """A JSON object without the checksum that it states. Raises: DataError if it is damaged or of another format."""
    try:
        values = parse_json(path.read_bytes())
        number = values["format"]
        is_damaged = values.pop("checksum") != checksum_of_json(values) if number in formats else False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is damaged ({error}); {remedy}") from None
    if number not in formats:
        known = " or ".join(map(str, formats))
        raise DataError(f"{path.parent}: has format {number}, not {known}: another version of twinax wrote it")
    if is_damaged:
        raise DataError(f"{path}: is damaged (it does not match its checksum); {remedy}")
    return values


def index_of(folder: Path, name: str, infos: Sequence[ShardInfo], key: Mapping[str, Any]) -> str:
    """The text of the index of a store whose shards are complete."""
    shards = [(path, Shard.open(path)) for path in (folder / shard_name(number) for number in range(len(infos)))]
    counts = Counts()
    for info in infos:
        counts = counts.plus(info.counts)
    index = {
        "format": FORMAT,
        "name": name,
        "key": dict(key),
        "counts": counts._asdict(),
        "largest_ids": [max(info.largest_ids[side] for info in infos) for side in (0, 1)],
        "fingerprint": _fingerprint([shard for _, shard in shards]),
        "shards": [[path.stat().st_size, shard.info.counts.kept] for path, shard in shards],
    }
    return json.dumps({**index, "checksum": checksum_of_json(index)}, indent=1) + "\n"


def _fingerprint(shards: Sequence[Shard]) -> str:
    """A hash of the ids of all sources, where each starts, and the same of targets; shards make no difference."""
    digest = sha256()
    for side in (0, 1):
        for shard in shards:
            digest.update(shard.sides[side].ids.astype(np.int32).tobytes())
        total = np.zeros(1, np.int64)
        digest.update(total.tobytes())
        for shard in shards:
            digest.update((shard.sides[side].starts[1:] + total).tobytes())
            total += int(shard.sides[side].starts[-1])
    return digest.hexdigest()[:16]
