"""Ctrl-C and SIGTERM ask training to save and end; a second Ctrl-C ends it at once."""

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """While it is entered, `caught` is the number of the signal that came, or None."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = number
