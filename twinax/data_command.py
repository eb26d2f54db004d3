"""`twinax data`: what a run's corpus looks like, before anything is trained."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from twinax.train.checkpointing.run_directory import has_begun, prepare_again
from twinax.train.data.prepare import prepare
from twinax.train.data.report import corpus_tables, plot_lengths
from twinax.train.warm_start import read_initial

from .run_arguments import Arguments, parse
from .usage import check_picture, one_line_errors

_DESCRIPTION = """Print what a run's corpus looks like: pairs, tokens, lengths, unknown words, padding, shapes.

Takes what `twinax train` takes, and writes nothing but the picture that you ask for.

Example: twinax data --src train.de --tgt train.en --plot lengths.png"""


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0."""
    parsed = parse(arguments, "twinax data", _DESCRIPTION, plot=True)
    if parsed.print_config:
        print(parsed.run.to_json(), end="")
        return 0
    check_picture("--plot", parsed.plot)
    errors = Console(stderr=True)

    def say(line: str) -> None:
        errors.print(line, markup=False, highlight=False, soft_wrap=True)

    with one_line_errors():
        prepared = _prepare(parsed, say)
        if parsed.plot is not None:
            plot_lengths(prepared, parsed.plot)
    console = Console()
    for table in corpus_tables(prepared):
        console.print(table)
    if parsed.plot is not None:
        console.print(f"lengths and shapes: {parsed.plot}", highlight=False)
    return 0


def _prepare(parsed: Arguments, say: Callable[[str], None]) -> Any:
    """What training would see: with the tokenizers and shapes of a run, or of weights to start from."""
    if parsed.name is not None and has_begun(Path(parsed.name)):
        return prepare_again(parsed.out, parsed.run, say)
    initial = read_initial(parsed.run)
    if initial is None:
        return prepare(parsed.run, say=say)
    tokenizers = None if parsed.run.tokenizer.load else initial.tokenizers
    return prepare(parsed.run, tokenizers, sizes=initial.config, say=say)
