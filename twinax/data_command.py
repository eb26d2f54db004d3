"""`twinax data`: what a run's corpus looks like, before anything is trained."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from twinax.train.prepare import prepare
from twinax.train.report import corpus_tables, plot_lengths

from .run_arguments import parse
from .usage import UsageError

_DESCRIPTION = """Print what a run's corpus looks like: pairs, tokens, lengths, unknown words, padding, shapes.

Takes what `twinax train` takes, and writes nothing but the picture that you ask for.

Example: twinax data --src train.de --tgt train.en --plot lengths.png"""


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0."""
    parsed = parse(arguments, "twinax data", _DESCRIPTION, plot=True)
    if parsed.print_config:
        print(parsed.run.to_json(), end="")
        return 0
    if parsed.plot is not None and not Path(parsed.plot).absolute().parent.is_dir():
        raise UsageError(f"--plot {parsed.plot}: there is no directory {Path(parsed.plot).parent}")
    errors = Console(stderr=True)
    try:
        prepared = prepare(
            parsed.run, say=lambda line: errors.print(line, markup=False, highlight=False, soft_wrap=True)
        )
    except ValueError as error:
        if not type(error).__module__.startswith("twinax."):
            raise
        raise UsageError(str(error)) from None
    console = Console()
    for table in corpus_tables(prepared):
        console.print(table)
    if parsed.plot is not None:
        plot_lengths(prepared, parsed.plot)
        console.print(f"lengths and shapes: {parsed.plot}", highlight=False)
    return 0
