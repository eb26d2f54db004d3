"""Entry point of the command, which imports nothing before it can handle Ctrl-C."""

import sys


def main() -> None:
    """Runs the command; Ctrl-C while it is being imported ends it as Ctrl-C does later."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("twinax: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
