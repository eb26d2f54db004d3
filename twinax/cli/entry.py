"""Entry point of the command, which imports nothing before it can handle Ctrl-C."""

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

from .process.importing import import_without_gc
from .process.streams import guard_streams

_IMPORTS = "<frozen importlib"  # how the files of Python's import system begin


def main() -> None:
    """Run the command; Ctrl-C ends it with one line, also while it imports."""
    guard_streams()
    signal.signal(signal.SIGINT, _interrupt)
    if find_spec("fcntl") is None:
        print("twinax: this system has no fcntl, which locks files; use Linux", file=sys.stderr)
        sys.exit(2)
    import_without_gc("twinax.cli.commands").main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process: C extensions that are being imported may ignore it, or crash."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            os.write(sys.stderr.fileno(), b"twinax: interrupted\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt
