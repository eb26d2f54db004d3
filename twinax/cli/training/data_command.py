"""`twinax data`: statistics of a run's corpus before training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ...train.checkpointing.run_directory import has_begun, prepare_again
from ...train.data.prepare import prepare
from ...train.data.report import corpus_tables, plot_lengths
from ...train.loop.warm_start import read_initial_weights
from ..flags.run_arguments import Arguments, parse
from ..usage import check_outputs, check_picture, one_line_errors

_DESCRIPTION = """Print statistics of a run's corpus: pairs, tokens, lengths, unknown words, padding, batch shapes.

Accepts the arguments of `twinax train`, and writes nothing except the picture of --plot.

Example: twinax data --src train.de --tgt train.en --plot lengths.png"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return exit status 0."""
    parsed = parse(arguments, "twinax data", _DESCRIPTION, plot=True)
    if parsed.print_config:
        print(parsed.run.to_json(), end="")
        return 0
    check_picture("--plot", parsed.plot)
    check_outputs([parsed.plot])
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
    """Prepare the run as training does, with tokenizers and batch shapes of an existing run or initial weights."""
    if parsed.name is not None and has_begun(Path(parsed.name)):
        return prepare_again(parsed.out, parsed.run, say)
    initial_weights = read_initial_weights(parsed.run)
    if initial_weights is None:
        return prepare(parsed.run, say=say)
    tokenizers = None if parsed.run.tokenizer.load else initial_weights.tokenizers
    return prepare(parsed.run, tokenizers, sizes=initial_weights.config, say=say)
