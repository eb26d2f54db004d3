"""Entry point of the command, which imports nothing before it can handle Ctrl-C."""

import logging
import os
import signal
import sys
import warnings
from types import CoroutineType, FrameType
from typing import Any

from .process.importing import import_uncollected
from .process.streams import guard_streams

_IMPORTS = "<frozen importlib"  # how the files of Python's import system begin


def main() -> None:
    """Run the command; Ctrl-C ends it with one line, also while it imports."""
    guard_streams()
    signal.signal(signal.SIGINT, _interrupt)
    if "--verbose" not in sys.argv:
        _hide_what_libraries_print()
    import_uncollected("twinax.cli.commands").main()


def _hide_what_libraries_print() -> None:
    """Hide the errors of orbax's threads and coroutines, because the command describes their cause in one line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = _report_unraisable


def _report_unraisable(error: Any) -> None:
    is_late_answer = str(error.exc_value) == "Event loop is closed"  # of tensorstore, to a coroutine that ended
    if not is_late_answer and not isinstance(error.object, CoroutineType):
        sys.__unraisablehook__(error)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process: C extensions that are being imported may ignore it, or crash."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            os.write(sys.stderr.fileno(), b"twinax: interrupted\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt
