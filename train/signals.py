"""Ctrl-C and SIGTERM ask training to save and end; a second one ends it at once.

Python runs a handler between bytecodes of the main thread, so not while XLA compiles. The interpreter's C handler
writes the signal's number to a pipe at once, and a thread that waits at its other end answers.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 1.0  # seconds in which the main thread may end by itself after the second signal


class StopSignals:
    """While entered, `caught` is the number of the signal that came, or None.

    `say` prints the answer, `close` restores the terminal before the process ends: both run in a thread of their own.
    """

    def __init__(self, say: Callable[[str], None], close: Callable[[], None]) -> None:
        self.caught: int | None = None
        self._work = "this update"
        self._say, self._close = say, close
        self._before: dict[int, Any] = {}
        self._left = Event()

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
        self._left.set()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writing)  # the watcher reads an end there
        self._watcher.join()
        os.close(self._reading)

    @contextmanager
    def during(self, work: str) -> Iterator[None]:
        """What the answer to a signal names meanwhile; a stop waits for its end."""
        before, self._work = self._work, work
        try:
            yield
        finally:
            self._work = before

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = number

    def _watch(self) -> None:
        """Answer the first signal, and end the process at the second, where the main thread does not do so itself."""
        count = 0
        while written := os.read(self._reading, 1):
            number = written[0]
            if number not in _SIGNALS:
                continue
            count += 1
            if count == 1:
                self._say(f"stopping after {self._work}; once more ends now")
            elif not self._left.wait(_GRACE):
                self._close()
                self._say("ended; the same command goes on after the last checkpoint")
                os._exit(128 + number)  # as after a SIGKILL, every listed checkpoint is whole
