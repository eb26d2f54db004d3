"""Ctrl-C and SIGTERM stop training after it has saved; a second signal ends the process immediately.

Python runs a signal handler between bytecodes of the main thread, so never while XLA compiles. The interpreter's C
handler writes the signal's number to a pipe immediately, and a thread reads it there and prints a message.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME = 0.5  # seconds in which two signals are one: a scheduler's, and the same one passed on by a supervisor
_GRACE = 1.0  # seconds in which the main thread may end by itself after the second signal


class StopSignals:
    """Context manager; inside it, `caught` is the number of the signal that was received, or None.

    `say` prints a message, `close` restores the terminal before the process ends. Both run in a separate thread.
    """

    def __init__(self, say: Callable[[str], None], close: Callable[[], None]) -> None:
        self.caught: int | None = None
        self._work = "this update"
        self._say, self._close = say, close
        self._before: dict[int, Any] = {}
        self._exited = Event()

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._catch)
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._watcher = Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exited.set()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writing)  # the watcher reads end-of-file
        self._watcher.join()
        os.close(self._reading)

    @contextmanager
    def during(self, work: str) -> Iterator[None]:
        """Names the work that the message about a signal mentions; a stop waits until it is finished."""
        before, self._work = self._work, work
        try:
            yield
        finally:
            self._work = before

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None and time.monotonic() - self._time > _SAME:
            raise KeyboardInterrupt
        if self.caught is None:
            self.caught, self._time = number, time.monotonic()

    def _watch(self) -> None:
        """Print a message at the first signal; end the process at the second if the main thread has not ended."""
        first = None  # time of the first signal
        while data := os.read(self._reading, 1):
            number, now = data[0], time.monotonic()
            if number not in _SIGNALS or (first is not None and now - first < _SAME):
                continue
            if first is None:
                first = now
                self._say(f"stopping after {self._work}; a second signal ends the process now")
            elif not self._exited.wait(_GRACE):
                self._close()
                self._say("ended; run the same command to resume after the last checkpoint")
                os._exit(128 + number)  # as after SIGKILL, every listed checkpoint is complete
