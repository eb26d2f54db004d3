"""Logs a run's metrics to SwanLab, an optional package, in addition to the run's own files.

SWANLAB_MODE sets the destination: online, offline (files for `swanlab sync`), local or disabled.
"""

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...backend.errors import DataError
from ...convert.io.atomic_io import replace_file

_ID = "swanlab_id"  # file of a run directory: a resumed run continues its experiment


def check_swanlab(project: str) -> None:
    """Raises: DataError if SwanLab is not installed."""
    try:
        import_module("swanlab")
    except ImportError:
        raise DataError(f"swanlab={project!r}: SwanLab is not installed: pip install 'twinax[swanlab]'") from None


class SwanLabTracker:
    """A tracker that logs to an experiment of a SwanLab project.

    Raises:
        DataError: SwanLab is not installed or cannot start.
    """

    def __init__(self, project: str, directory: Path, settings: Mapping[str, Any]):
        check_swanlab(project)
        self._swanlab = import_module("swanlab")
        if not (directory / _ID).is_file():
            replace_file(directory / _ID, secrets.token_hex(4))
        try:
            self._swanlab.init(
                project=project,
                experiment_name=directory.name,
                config=dict(settings),
                logdir=str(directory / "swanlab"),
                id=(directory / _ID).read_text(),
                resume="allow",
            )
        except Exception as error:  # SwanLab raises many types
            cause = " ".join(str(error).split())[:200]
            raise DataError(
                f"swanlab={project!r}: SwanLab cannot start: {cause}; log in, or set SWANLAB_MODE=offline"
            ) from None

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of an update."""
        self._swanlab.log(dict(numbers), step=update)

    def flush(self) -> None:
        """SwanLab sends by itself."""

    def close(self) -> None:
        """Finish the experiment."""
        self._swanlab.finish()
