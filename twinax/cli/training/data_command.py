"""`twinax data`: statistics of a run's corpus before training."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...backend.cache_directory import cache_directory
from ...backend.errors import ConfigError
from ...train.checkpointing.run_directory import has_begun, prepare_again
from ...train.data.corpus_cache import cached_corpora, clear_corpora
from ...train.data.prepare import prepare
from ...train.data.report import corpus_tables, plot_lengths
from ...train.loop.warm_start import read_initial_weights
from ..flags.run_arguments import Arguments, parse
from ..usage import check_outputs, check_picture, one_line_errors

_DESCRIPTION = """Print statistics of a run's corpus: pairs, tokens, lengths, unknown words, padding, batch shapes.

Accepts the arguments of `twinax train`. What it encodes is kept in the user's cache, where `twinax train` finds it, or
in the folder of --store. `twinax data --cache` lists the cache, `twinax data --clear-cache` empties it.

Example: twinax data --src train.de --tgt train.en --plot lengths.png"""
_CACHE, _CLEAR = "--cache", "--clear-cache"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return exit status 0."""
    if [*arguments] in ([_CACHE], [_CLEAR]):
        return _show_cache() if [*arguments] == [_CACHE] else _clear_cache()
    parsed = parse(arguments, "twinax data", _DESCRIPTION, (_CACHE, _CLEAR), data=True)
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
    if parsed.store is not None:
        console.print(f"encoded pairs: {parsed.store}", highlight=False)
    return 0


def _show_cache() -> int:
    """Print what the cache of corpora holds."""
    table = Table("corpus", "pairs", "MB", title=str(cache_directory("corpora")))
    for entry in cached_corpora():
        pairs = "not complete" if entry.pairs is None else f"{entry.pairs:,}"
        table.add_row(entry.name, pairs, f"{entry.size / 1e6:,.1f}")
    Console().print(table)
    return 0


def _clear_cache() -> int:
    """Remove what the cache of corpora holds, except what another process is writing."""
    removed, kept = clear_corpora()
    print(f"removed {removed / 1e6:,.1f} MB from {cache_directory('corpora')}")
    for name in kept:
        print(f"twinax: {name}: another process writes it; it stays", file=sys.stderr)
    return 0


def _prepare(parsed: Arguments, say: Callable[[str], None]) -> Any:
    """Prepare the run as training does, with tokenizers and batch shapes of an existing run or initial weights."""
    store = None if parsed.store is None else Path(parsed.store)
    if store is not None and parsed.run.corpus.store is not None:
        raise ConfigError(
            f"--store {store}: the pairs come from --corpus.store {parsed.run.corpus.store}; copy that folder"
        )
    if parsed.name is not None and has_begun(Path(parsed.name)):
        return prepare_again(parsed.out, parsed.run, say, store)
    initial_weights = read_initial_weights(parsed.run)
    if initial_weights is None:
        return prepare(parsed.run, say=say, store=store)
    tokenizers = None if parsed.run.tokenizer.load else initial_weights.tokenizers
    return prepare(parsed.run, tokenizers, sizes=initial_weights.config, say=say, store=store)
