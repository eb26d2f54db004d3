"""Runs and their checkpoints, recognized by the names in them. Reading and writing them imports `train` and orbax."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...configs.registry import later_module
from .format import Format

CONFIG, DATA, LOCK = "config.json", "data.json", "lock"
CHECKPOINTS, AVERAGED = "checkpoints", "averaged"  # in a run directory
WEIGHTS = "weights"  # replaces `state` in a checkpoint of weights alone, which `convert` writes


def is_checkpoint(path: Path) -> bool:
    """Whether the path is the folder of one checkpoint."""
    return (path / "run").is_dir() and any((path / name).is_dir() for name in ("state", WEIGHTS))


def is_run_or_checkpoint(path: Path) -> bool:
    """Whether the path is a checkpoint or a run directory, which may have none yet."""
    has_checkpoints = any((path / name).is_dir() for name in (CHECKPOINTS, AVERAGED))
    return has_checkpoints or is_checkpoint(path) or all((path / name).is_file() for name in (CONFIG, DATA, LOCK))


def _of_train(name: str) -> Callable[..., Any]:
    return lambda *arguments: getattr(later_module("runs"), name)(*arguments)


FORMAT = Format(
    recognizes=is_run_or_checkpoint,
    accepts=lambda path, layout: layout == "twinax" and not path.suffix[1:].isalpha(),
    describe=_of_train("describe"),
    protection=_of_train("protection"),
    read=_of_train("read"),
    read_config=_of_train("read_config"),
    write=_of_train("write"),
    read_weights=_of_train("read_without_training"),
)
