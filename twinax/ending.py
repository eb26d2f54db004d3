"""How the command ends: an exit status, and one line on standard error if it fails."""

import sys
from collections.abc import Callable
from typing import NoReturn

from .messages import DEFECT, describe_defect, one_line
from .streams import STDOUT, drop_output
from .usage import UsageError


def run_and_exit(run: Callable[[], int | None]) -> NoReturn:
    """Call a function that returns the exit status, and exit with it; or with that of its exception."""
    try:
        status = run()
        sys.stdout.flush()
        sys.exit(status)
    except UsageError as error:
        _fail(one_line(str(error)), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except MemoryError:
        _fail("out of memory", 2)
    except Exception as error:
        if isinstance(error, OSError) and error.filename == STDOUT:
            _fail(f"{STDOUT}: {error.strerror}", 2)
        _fail(describe_defect(error), DEFECT)
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            drop_output()


def _fail(line: str, status: int) -> NoReturn:
    print(f"twinax: {line}", file=sys.stderr)
    sys.exit(status)
