"""Removal of paths from a checkpoint that leaves the machine: they name people, projects and hosts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..configs.json_text import parse_json
from ..configs.run import RunConfig
from .checkpoint import Checkpoint

_FILES = ("src", "tgt", "dataset", "valid_src", "valid_tgt", "valid_dataset")  # fields of the corpus


def without_paths(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with each absolute path in its run, documents and tokenizer files cut to its last part.

    In the run, relative paths that exist here are cut too; names of datasets on the Hugging Face Hub are unchanged.
    """
    training = checkpoint.training
    return replace(
        checkpoint,
        documents=_without(checkpoint.documents),
        files={name: _rewrite(name, content) for name, content in checkpoint.files.items()},
        training=None if training is None else replace(training, run=_without_files(training.run)),
    )


def _without_files(run: RunConfig) -> RunConfig:
    corpus = {name: _name(getattr(run.corpus, name)) for name in _FILES}
    tokenizer = replace(run.tokenizer, load=tuple(map(_last_part, run.tokenizer.load)))
    initial = {name: _name(getattr(run, name)) for name in ("init_from", "adapter")}
    return replace(run, corpus=replace(run.corpus, **corpus), tokenizer=tokenizer, **initial)


def _name(path: str | None) -> str | None:
    """The last part of the path of something that exists, or that is absolute."""
    if path is None:
        return None
    return _last_part(path) if Path(path).exists() or _is_absolute(path) else path


def _last_part(path: str) -> str:
    return PureWindowsPath(path).name or path


def _is_absolute(text: str) -> bool:
    is_posix = PurePosixPath(text).is_absolute() and len(PurePosixPath(text).parts) > 2  # "/" and "//x" are tokens
    return is_posix or PureWindowsPath(text).is_absolute() or text.startswith("~/")


def _rewrite(name: str, content: bytes) -> bytes:
    """The content of a tokenizer's settings; other files, which hold tokens, stay."""
    if PurePosixPath(name).name != "tokenizer_config.json":
        return content
    try:
        values = parse_json(content)
        new_values = _without(values)
    except ValueError:  # the tokenizer's reader describes it
        return content
    if new_values == values:
        return content
    return (json.dumps(new_values, indent=2, ensure_ascii=False) + "\n").encode()


def _without(value: Any) -> Any:
    """JSON values with the last part of each text that is an absolute path."""
    if isinstance(value, Mapping):
        return {key: _without(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item) for item in value]
    return _last_part(value) if isinstance(value, str) and _is_absolute(value) else value
