"""marian-dev models: an `.npz` with its options as YAML, and vocabularies."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ...configs.json_text import parse_json
from ..checkpoint import MARIAN_OPTIONS, Checkpoint
from ..io.atomic_io import new_file
from ..io.headers import zip_names
from ..io.untrusted import check_declared_bytes
from ..layouts import marian_npz

LAYOUT = "marian_npz"
SUFFIX = ".npz"
_OPTIONS = "special:model.yml"
_MAX_BYTES = 1 << 20  # of the options, which take 2 kB


def recognizes(path: Path) -> bool:
    """Whether a path is an `.npz` file, by its content or its name."""
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    return f"{_OPTIONS}.npy" in (zip_names(path) or ())


def read(path: Path) -> Checkpoint:
    """The checkpoint in an `.npz` file.

    Raises:
        ConversionError: the file is damaged or no Marian model, or twinax does not support the model or an option.
    """
    arrays = _read_arrays(path)
    try:
        options = _read_options(arrays)
        config, arrays = marian_npz.read(options, arrays)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from None
    return Checkpoint(config, arrays, LAYOUT, {MARIAN_OPTIONS: options})


def write(checkpoint: Checkpoint, path: Path, layout: str) -> None:
    """Atomically write a new `.npz` file that Marian loads; vocabularies are files of their own.

    Raises:
        ConversionError: Marian has no such model, the file exists, or writing fails.
    """
    import yaml

    config = checkpoint.config
    options = dict(checkpoint.documents.get(MARIAN_OPTIONS, {})) if checkpoint.layout == LAYOUT else {}
    new_options = marian_npz.options_of(config)
    if not options or not _is_same(options, checkpoint):
        options = {name: value for name, value in options.items() if name != marian_npz.OLD_POSITIONS} | new_options
    arrays = marian_npz.write(config, checkpoint.arrays)
    vocabularies = [arrays.get("Wemb", arrays.get(f"{side}_Wemb", ())) for side in ("encoder", "decoder")]
    options["dim-vocabs"] = [len(table) for table in vocabularies]
    text = yaml.safe_dump(options, allow_unicode=True).encode() + b"\0"
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    contiguous[_OPTIONS] = np.frombuffer(text, np.int8)
    with new_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **contiguous)


def _is_same(options: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether the options are still those of the config."""
    config = checkpoint.config
    rows = config.max_length if config.positions == "learned" else None
    original = marian_npz.config_of(options, config.tgt_vocab_size, rows, config.param_dtype)
    return marian_npz.options_of(original) == marian_npz.options_of(config)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        # opened here, because numpy leaves a damaged file open
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            check_declared_bytes(sum(entry.file_size for entry in file.zip.infolist()))
            arrays = {name: file[name] for name in file.files}
        if damaged := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ConversionError(f"{damaged[0]} is damaged: it is no array")
        return arrays
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from None
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:200]
        raise ConversionError(f"{path}: not a complete .npz file of plain arrays: {reason}") from None


def _read_options(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The options among the arrays, which are removed from them."""
    import yaml

    if (stored := arrays.pop(_OPTIONS, None)) is None:
        raise ConversionError(f"has no {_OPTIONS}, so it is not a model that Marian wrote")
    text = stored.tobytes().rstrip(b"\0")
    try:
        if len(text) > _MAX_BYTES or any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("too long, or with aliases")
        options = json.loads(json.dumps(yaml.safe_load(text), default=str))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConversionError(f"{_OPTIONS}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(options, dict):
        raise ConversionError(f"{_OPTIONS}: holds a {type(options).__name__}, not options by name")
    return options


def read_vocabulary(path: Path) -> dict[str, int]:
    """The ids of a Marian vocabulary by token, from YAML or JSON.

    Raises:
        ConversionError: the file cannot be read, or is not a mapping from tokens to different ids.
    """
    try:
        text = path.read_text(encoding="utf-8")
        ids = parse_json(text) if path.suffix.lower() == ".json" else _entries(text)
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: is not a vocabulary: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(ids, dict) or not ids or not all(type(i) is int and i >= 0 for i in ids.values()):
        raise ConversionError(f"{path}: is not a vocabulary, a mapping from tokens to ids")
    if len({*ids.values()}) < len(ids):
        raise ConversionError(f"{path}: gives two tokens the same id")
    return ids


def _entries(text: str) -> dict[str, int]:
    """The ids by token of a YAML mapping; its events are enough, and libyaml makes them quickly."""
    import yaml

    try:
        scalars = [*_scalars(yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)))]
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    ids: dict[str, int] = {}
    for token, number in zip(scalars[::2], scalars[1::2], strict=True):
        if token in ids or not number.isdecimal():
            cause = "occurs twice" if token in ids else f"has {number[:80]!r}, not an id"
            raise ValueError(f"the token {token[:80]!r} {cause}")
        ids[token] = int(number)
    return ids


def _scalars(events: Iterable[Any]) -> Iterator[str]:
    """The keys and values of one mapping. Raises: ValueError at the first event of anything else."""
    import yaml

    frame = yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent, yaml.StreamEndEvent
    mappings = 0
    for event in events:
        mappings += isinstance(event, yaml.MappingStartEvent)
        if isinstance(event, yaml.ScalarEvent):
            if not mappings:
                raise ValueError(f"{event.value[:80]!r} is not a token, a colon and an id")
            yield event.value
        elif mappings > 1 or not isinstance(event, (*frame, yaml.MappingStartEvent, yaml.MappingEndEvent)):
            raise ValueError(f"line {event.start_mark.line + 1} is not a token, a colon and an id")
