"""The command `twinax`. Each subcommand imports what it needs when it runs."""

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import CoroutineType
from typing import Any

import tyro

from ..configs.verification import verifying
from .flags.checkpoints import Convert, Inspect
from .flags.demo import Demo
from .flags.foreign_flags import check_flags
from .flags.known_flags import check_known
from .flags.plan import Plan
from .flags.proofs import Audit, Capture, Compare, Parity
from .flags.serve import Serve
from .flags.text import Evaluate, Score, Translate
from .process.exit_status import run_and_exit
from .process.importing import import_without_gc
from .process.messages import set_encoding_errors, show_all
from .usage import UsageError

_DESCRIPTION = """Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal.

Every command takes --no-verify (read checkpoints without comparing arrays with their checksums) and --verbose (list all
problems of an input, not only the first three)."""


def train(arguments: Sequence[str]) -> int:
    """Train a model on a predefined run or on your own parallel text; the same command resumes."""
    return import_without_gc("twinax.cli.training.train_command").main(arguments)


def data(arguments: Sequence[str]) -> int:
    """Print statistics of a corpus: pairs, tokens, lengths, unknown words, padding, batch shapes."""
    return import_without_gc("twinax.cli.training.data_command").main(arguments)


# These parse their own flags, because the flags depend on the run.
_OWN_FLAGS: dict[str, Callable[[Sequence[str]], int]] = {"train": train, "data": data}
COMMANDS: dict[str, Any] = _OWN_FLAGS | {
    kind.__name__.lower(): kind
    for kind in (Translate, Evaluate, Score, Serve, Parity, Compare, Capture, Audit, Convert, Inspect, Plan, Demo)
}


def main() -> None:
    """Entry point of the command."""
    # An exception, so that contexts are closed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    set_encoding_errors("backslashreplace", sys.stdout, sys.stderr)  # tables have characters that a terminal may lack
    name, *words = [*sys.argv[1:], ""][: max(len(sys.argv) - 1, 1)]
    end = words.index("--") if "--" in words else len(words)
    global_flags = {"--verbose", "--no-verify"}.intersection(words[:end])
    words = [word for i, word in enumerate(words) if i >= end or word not in global_flags]
    show_all("--verbose" in global_flags)
    if "--verbose" not in global_flags:
        _hide_what_libraries_print()
    run_and_exit(lambda: _run(name, words, verify="--no-verify" not in global_flags))


def _run(name: str, words: Sequence[str], *, verify: bool) -> int:
    """Run a command with its arguments; return its exit status."""
    if name == "--version":
        _print_versions()
        return 0
    if name[:1] not in ("", "-") and name not in COMMANDS:
        hint = "".join(f"; did you mean {suggestion}?" for suggestion in get_close_matches(name, COMMANDS, 1))
        raise UsageError(f"{name}: there is no such command; the commands are {', '.join(COMMANDS)}{hint}")
    with verifying(verify):
        check_flags(name, words)
        if name in _OWN_FLAGS:
            return _OWN_FLAGS[name](words)
        if name in COMMANDS:  # alone, so that its errors name its own help and flags
            check_known(name, COMMANDS[name], words)
            return tyro.cli(COMMANDS[name], args=words, prog=f"twinax {name}").execute()
    arguments = [name, *words] if name else []
    commands = _with_own_flags() if any("-completion" in word for word in arguments) else COMMANDS
    tyro.extras.subcommand_cli_from_dict(commands, args=arguments, prog="twinax", description=_DESCRIPTION)
    return 0


def _print_versions() -> None:
    """Print what a report of a defect needs: versions, platform and devices, one per line."""
    module = import_without_gc("twinax.backend.environment")
    for name, value in (dict.fromkeys(module.PACKAGES, "not installed") | module.environment()).items():
        print(name, value)


def _with_own_flags() -> dict[str, Any]:
    """The commands for shell completion, with the flags of those that parse their own."""
    command_class = import_module("twinax.cli.flags.run_arguments").completion_class
    return COMMANDS | {name: command_class(name) for name in _OWN_FLAGS}


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
