"""A run's numbers for SwanLab, an optional package, beside the run's own files.

SWANLAB_MODE says where they go: online, offline (files for `swanlab sync`), local or disabled.
"""

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...configs.errors import DataError

_ID = "swanlab_id"  # file of a run directory: a run that goes on goes on with its experiment


def check_swanlab(project: str) -> None:
    """Raises: DataError where SwanLab is not installed."""
    try:
        import_module("swanlab")
    except ImportError:
        raise DataError(f"swanlab={project!r}: SwanLab is not installed: pip install 'twinax[swanlab]'") from None


class SwanLabTracker:
    """An experiment of a project.

    Raises:
        DataError: SwanLab is not installed, or does not begin.
    """

    def __init__(self, project: str, directory: Path, settings: Mapping[str, Any]):
        check_swanlab(project)
        self._swanlab = import_module("swanlab")
        if not (directory / _ID).is_file():
            (directory / _ID).write_text(secrets.token_hex(4))
        try:
            self._swanlab.init(
                project=project,
                experiment_name=directory.name,
                config=dict(settings),
                logdir=str(directory / "swanlab"),
                id=(directory / _ID).read_text(),
                resume="allow",
            )
        except Exception as error:  # it has no class of its own for what it cannot do
            said = " ".join(str(error).split())[:200]
            raise DataError(
                f"swanlab={project!r}: SwanLab does not begin: {said}; log in, or set SWANLAB_MODE=offline"
            ) from None

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of an update."""
        self._swanlab.log(dict(numbers), step=update)

    def flush(self) -> None:
        """SwanLab sends by itself."""

    def close(self) -> None:
        """Ends the experiment."""
        self._swanlab.finish()
