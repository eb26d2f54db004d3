"""Reads sentence pairs from files and the Hugging Face hub, unchanged; every error names the file."""

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...backend.errors import DataError
from ...configs.data import CorpusConfig, is_file
from ...configs.json_text import parse_json

Pairs = Iterator[tuple[str, str]]

# Suffix of a file -> the builder of `datasets` that reads it.
_BUILDERS = {".parquet": "parquet"}
_SAVED = "state.json"  # in a directory of `datasets.Dataset.save_to_disk`
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_pairs(config: CorpusConfig) -> Pairs:
    """(source, target) sentences in order, empty ones included.

    Raises:
        DataError: a file is missing, damaged, not UTF-8 or empty; the two files differ in their number of lines; a
            column is missing or is not text.
    """
    pairs = _parallel(config) if config.dataset is None else _columns(config, config.dataset)
    first = next(pairs, None)
    if first is None:
        raise DataError(f"{config.dataset or config.src}: has no sentence pair")
    return itertools.chain([first], pairs)


def identity_of(config: CorpusConfig) -> dict[str, Any]:
    """JSON values that change when the files of a corpus do. Raises: DataError if `datasets` cannot load it."""
    names = config.src, config.tgt, config.dataset
    if config.dataset is not None and not is_file(config.dataset):
        rows, columns = _load_dataset(config, config.dataset, None)
        return {"fingerprint": rows._fingerprint, "columns": columns}
    paths = [Path(name) for name in names if name is not None and Path(name).is_file()]
    files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino] for path in paths]
    return {"files": files, "columns": [config.src_column, config.tgt_column]}


def _parallel(config: CorpusConfig) -> Pairs:
    assert config.src is not None
    assert config.tgt is not None
    sides = read_lines(config.src), read_lines(config.tgt)
    for number in itertools.count():
        src, tgt = (next(side, None) for side in sides)
        if src is None and tgt is None:
            return
        if src is None or tgt is None:
            src_rest, tgt_rest = (sum(1 for _ in side) for side in sides)
            raise DataError(
                f"{config.src} has {number + (src is not None) + src_rest} lines and "
                f"{config.tgt} has {number + (tgt is not None) + tgt_rest}: they must have the same number"
            )
        yield src, tgt


def read_lines(path: str) -> Iterator[str]:
    """Lines of a UTF-8 file, gzipped or not, without line endings. Raises: DataError, as `read_pairs`."""
    if not Path(path).is_file():
        is_folder, exists = Path(path).is_dir(), Path(path).exists()
        reason = (
            "a directory; pass a text file" if is_folder else "a pipe or a device; save it to a file, and pass that"
        )
        raise DataError(f"{path}: {f'is {reason}' if exists else 'there is no such file'}")
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        yield from decode_lines(file, path)


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines of UTF-8 bytes. Raises: DataError, with `name` and the line, if they cannot be decoded."""
    number = 0
    try:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(_UTF16):
                raise DataError(f"{name}: is UTF-16; save it as UTF-8")
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{name}, line {number}: is not UTF-8 (byte 0x{byte:02x} at {error.start + 1}); save it as UTF-8"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name}, after line {number}: is cut off or not gzip ({error})") from None


def _columns(config: CorpusConfig, dataset: str) -> Pairs:
    ending = Path(dataset.removesuffix(".gz")).suffix
    if ending == ".tsv":
        return _tab_separated(config, dataset)
    if ending == ".txt":
        return _scan(dataset)
    if ending in (".json", ".jsonl"):
        return _json(config, dataset)
    if ending == ".csv":
        return _csv(config, dataset)
    return _with_datasets(config, dataset, _BUILDERS.get(ending))


def _tab_separated(config: CorpusConfig, path: str) -> Pairs:
    """Two columns by the names in the header, or the first two if the config names none; quotes are not special."""
    lines = read_lines(path)
    indices = (0, 1)
    names = (config.src_column, config.tgt_column)
    if config.src_column is not None:
        header = next(lines, "").split("\t")
        indices = tuple(header.index(name) if name in header else _missing(path, name, header) for name in names)
    for number, line in enumerate(lines, 1 if config.src_column is None else 2):
        fields = line.split("\t")
        if len(fields) <= max(indices):
            raise DataError(f"{path}, line {number}: must have at least {max(indices) + 1} columns, not {len(fields)}")
        yield fields[indices[0]], fields[indices[1]]


def _csv(config: CorpusConfig, path: str) -> Pairs:
    """Comma-separated columns with a header. Not by `datasets`, which reads the sentence `null` as a missing value."""
    names = _columns_of(config, path)
    rows = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True)
    try:
        header = next(rows, [])
        indices = [header.index(name) if name in header else _missing(path, name, header) for name in names]
        for row in rows:
            if row and len(row) != len(header):
                raise DataError(
                    f"{path}, line {rows.line_num}: must have {len(header)} columns like the header, not {len(row)}; "
                    "quote fields that contain commas"
                )
            if row:
                yield row[indices[0]], row[indices[1]]
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: is not CSV: {error}") from None


def _scan(path: str) -> Pairs:
    """Lines `IN: command OUT: actions`. Source: Lake and Baroni 2018, SCAN."""
    for number, line in enumerate(read_lines(path), 1):
        command, separator, actions = line.removeprefix("IN: ").partition(" OUT: ")
        if not separator or not line.startswith("IN: "):
            raise DataError(f"{path}, line {number}: is not 'IN: ... OUT: ...'; pass text files as src and tgt")
        yield command, actions


def _json(config: CorpusConfig, path: str) -> Pairs:
    """Objects with both columns, or with a `translation` that has both: one per line, or all in one list.

    Not by `datasets`, because a file of `null` crashes the process there.
    """
    names = _columns_of(config, path)
    for place, row in _json_rows(path):
        if isinstance(row, dict) and isinstance(row.get("translation"), dict):
            row = row["translation"]
        if not isinstance(row, dict):
            raise DataError(f"{path}, {place}: is {json.dumps(row)[:60]}, not an object with both columns")
        for name in names:
            if name not in row:
                _missing(f"{path}, {place}", name, [str(column) for column in row])
        yield _text(path, place, names[0], row), _text(path, place, names[1], row)


def _json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of each row. Raises: DataError if it is not JSON."""
    lines = ((number, line) for number, line in enumerate(read_lines(path), 1) if line.strip())
    number, first = next(lines, (1, ""))
    if first.lstrip().startswith("["):
        rows = _parse("\n".join((first, *(line for _, line in lines))), path)
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    for place, line in itertools.chain([(number, first)] if first else [], lines):
        yield f"line {place}", _parse(line, f"{path}, line {place}")


def _parse(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{place}: is not JSON: {error}") from None


def _columns_of(config: CorpusConfig, name: str) -> tuple[str, str]:
    """The names of both columns. Raises: DataError if they are not set."""
    if config.src_column is None or config.tgt_column is None:
        raise DataError(f"{name}: set src_column and tgt_column to the columns of source and target")
    return config.src_column, config.tgt_column


def _with_datasets(config: CorpusConfig, name: str, builder: str | None) -> Pairs:
    """A file through its builder, or a directory or hub name directly."""
    rows, names = _load_dataset(config, name, builder)
    iterator = iter(rows.select_columns(names))
    number = 0
    while True:
        number += 1
        try:
            row = next(iterator, None)
        except Exception as error:  # invalid UTF-8 is noticed only on reading
            raise DataError(f"{name}, row {number}: cannot be read: {' '.join(str(error).split())[:200]}") from None
        if row is None:
            return
        yield _text(name, f"row {number}", names[0], row), _text(name, f"row {number}", names[1], row)


def _load_dataset(config: CorpusConfig, name: str, builder: str | None) -> tuple[Any, list[str]]:
    """(the rows of a `datasets.Dataset`, the names of both columns)."""
    import datasets

    wanted = _columns_of(config, name)
    if builder is not None and not Path(name).is_file():
        raise DataError(f"{name}: there is no such file")
    try:
        if builder is None and Path(name, _SAVED).is_file():
            files = _files_of_saved(Path(name), config.split)
            rows = datasets.load_dataset("arrow", data_files=files, split=config.split)
        elif builder is None:
            rows = datasets.load_dataset(name, config.subset, split=config.split)
        else:
            rows = datasets.load_dataset(builder, data_files=name, split="train")
    except Exception as error:  # the library raises many types
        cause = error.__cause__ or error
        text = " ".join(f"{error} {cause if cause is not error else ''}".split())
        raise DataError(f"{name}: datasets cannot load it: {text[:300]}") from None
    assert isinstance(rows, datasets.Dataset)
    prefix, columns = "", rows.column_names
    if "translation" in rows.column_names:
        rows, prefix = rows.flatten(), "translation."
        columns = [c.removeprefix(prefix) for c in rows.column_names if c.startswith(prefix)]
    return rows, [prefix + c if c in columns else _missing(name, c, columns) for c in wanted]


def _files_of_saved(folder: Path, split: str | None) -> dict[str, list[str]]:
    """The files of one dataset that `save_to_disk` wrote, as the split that it was, or as train."""
    state = parse_json((folder / _SAVED).read_text(encoding="utf-8"))
    name = (split or "train").partition("[")[0]
    files = [str(folder / Path(file["filename"]).name) for file in state["_data_files"]]
    return {name if name == state.get("_split") else "train": files}


def _text(name: str, place: str, column: str, row: Any) -> str:
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name}, {place}: column {column} has {type(value).__name__} {value!r}, not text")
    try:
        (value or "").encode()
    except UnicodeEncodeError:  # JSON can escape half a character
        raise DataError(f"{name}, {place}: column {column} has a lone surrogate: {value!a}"[:300]) from None
    return value or ""


def _missing(name: str, column: str | None, columns: list[str]) -> Any:
    raise DataError(f"{name}: has no column {column!r}; it has {', '.join(columns)}")
