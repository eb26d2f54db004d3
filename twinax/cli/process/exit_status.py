"""How the command ends: an exit status, and one line on standard error if it fails."""

import sys
from collections.abc import Callable
from typing import NoReturn

from ..usage import UsageError
from .messages import DEFECT, describe_defect, one_line
from .streams import STDOUT, drop_output


def run_and_exit(run: Callable[[], int | None]) -> NoReturn:
    """Call a function that returns the exit status, and exit with it; or with that of its exception."""
    try:
        status = _status(run)
    except SystemExit as end:  # as of a signal, or after a help text
        status = end.code
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        status = status or _report(f"{STDOUT}: {error.strerror}", 2)
    sys.exit(status)


def _status(run: Callable[[], int | None]) -> int | None:
    """The exit status of a function; of an exception, which is reported in one line, another one than 0 and 1."""
    try:
        return run()
    except UsageError as error:
        return _report(one_line(str(error)), 2)
    except KeyboardInterrupt:
        return _report("interrupted", 130)
    except MemoryError:
        return _report("out of memory", 2)
    except Exception as error:
        if isinstance(error, OSError) and error.filename == STDOUT:
            return _report(f"{STDOUT}: {error.strerror}", 2)
        return _report(describe_defect(error), DEFECT)


def _report(line: str, status: int) -> int:
    print(f"twinax: {line}", file=sys.stderr)
    return status
