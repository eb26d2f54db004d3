"""Logs the metrics of a run to TensorBoard, without TensorFlow or torch."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardTracker:
    """Event files in `tensorboard` of a run directory; events after `update` are marked as superseded."""

    def __init__(self, directory: Path, update: int):
        self._writer = EventFileWriter(str(directory / "tensorboard"))
        if update:
            self._writer.add_event(Event(step=update + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, update: int, numbers: Mapping[str, float]) -> None:
        """Add a scalar per number."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=update, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
