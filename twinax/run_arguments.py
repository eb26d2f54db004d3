"""What `twinax train` and `twinax data` are told: a ready-made run, somebody's own corpus, or a run that was begun."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from os.path import exists
from pathlib import Path
from typing import Annotated, Any

import tyro

from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.errors import ConfigError
from twinax.configs.run import RunConfig, differences
from twinax.presets.runs import RUN_NAMES, RUNS, run_preset
from twinax.train.data.spacy_pretokenizer import has_spacy

from . import train_help
from .usage import UsageError, one_line_errors

# Names without what they belong to, for what every run needs.
_SHORT = {f"--{f.name.replace('_', '-')}": f"--corpus.{f.name.replace('_', '-')}" for f in fields(CorpusConfig)}
_CORPUS = ("--corpus.src", "--corpus.dataset")


@dataclass(frozen=True)
class Arguments:
    """A run, and the directory that it is in."""

    name: str | None
    run: RunConfig
    out: Path
    plot: str | None
    print_config: bool


def parse(arguments: Sequence[str], prog: str, description: str, *, plot: bool = False) -> Arguments:
    """The run that a command line describes.

    Raises:
        UsageError: there is no such run, or flags contradict each other.
        SystemExit: after the help; by tyro for unknown flags.
    """
    given = [_long(word) for word in arguments]
    name = given.pop(0) if given and not given[0].startswith("-") else None
    directory = Path(name) if name is not None and (Path(name) / "config.json").is_file() else None
    if late := next((word for word in given if word in RUNS), None):
        raise UsageError(f"{late}: the name of a run comes first, as in {prog} {late}")
    base = _base(name, directory, given)
    if {"-h", "--help"} & {*given}:
        train_help.show(prog, description, base or RunConfig(corpus=tyro.MISSING_NONPROP), plot)
        sys.exit(0)
    given = ["--help" if word == "--help-all" else word for word in given]
    kind = _command(base, plot)
    try:
        parsed: Any = tyro.cli(kind, args=given, prog=prog, description=description)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    _check_from_tokenizers(parsed.run, base)
    _check_initial(parsed.run, base)
    if directory is not None and parsed.out is not None:
        raise UsageError(f"--out {parsed.out}: {directory} is a run that goes on where it is; leave --out away")
    out = directory or Path(parsed.out or Path("runs") / (name or "own").replace(":", "-"))
    run = parsed.run if directory is not None else _with_words(parsed.run, base)
    return Arguments(name, run, out, parsed.plot if plot else None, parsed.print_config)


def _long(word: str) -> str:
    flag, equals, value = word.partition("=")
    flag = flag.replace("_", "-") if flag.startswith("--") else flag
    return f"{_SHORT.get(flag, flag)}{equals}{value}"


def _value(given: Sequence[str], flag: str) -> str | None:
    """What follows a flag, or stands behind its `=`."""
    for i, word in enumerate(given):
        if word == flag and i + 1 < len(given):
            return given[i + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _base(name: str | None, directory: Path | None, given: Sequence[str]) -> RunConfig | None:
    """What the flags change: the run of that name or directory; None: the defaults."""
    if directory is not None:
        from twinax.configs.errors import CheckpointError
        from twinax.train.checkpointing.checkpoints import read_run

        try:
            base = read_run(directory)
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        return _with_length(base, given)
    if name is not None and name not in RUNS:
        near = get_close_matches(name, RUNS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if exists(name):
            hint = "; --init-from starts a run from the weights of any checkpoint"
        raise UsageError(f"{name}: is neither a ready-made run ({RUN_NAMES}) nor the directory of one{hint}")
    base = _with_length(run_preset(name), given) if name is not None else None
    if base is not None and any(_value(given, flag) for flag in _CORPUS):
        base = replace(base, corpus=tyro.MISSING_NONPROP)
    elif base is not None and _value(given, "--corpus.valid-src") is not None:
        base = replace(base, corpus=replace(base.corpus, valid_split=None, valid_dataset=None))
    if base is not None and _value(given, "--tokenizer.load") is not None:
        base = replace(base, tokenizer=TokenizerConfig())
    if (initial := _value(given, "--init-from")) is not None:
        base = base or RunConfig(corpus=tyro.MISSING_NONPROP)
        model, tokenizer = _settings_of(initial)
        loads = _value(given, "--tokenizer.load") is not None
        base = replace(base, model=model, tokenizer=TokenizerConfig() if loads else tokenizer)
    return base


def _with_words(run: RunConfig, base: RunConfig | None) -> RunConfig:
    """The run with words that can be cut here: a ready-made one's at punctuation where spaCy is not installed."""
    asked = base is None or run.tokenizer.languages != base.tokenizer.languages
    if asked or not run.tokenizer.languages or run.init_from is not None or has_spacy():
        return run
    print(
        "twinax: spaCy is not installed: words are cut at whitespace and punctuation; pip install 'twinax[spacy]' for "
        "its rules",
        file=sys.stderr,
    )
    return replace(run, tokenizer=replace(run.tokenizer, languages=(), split="punctuation"))


def _with_length(base: RunConfig, given: Sequence[str]) -> RunConfig:
    """The run without its updates where epochs are given, and the other way round: a flag replaces both."""
    for flag, other in (("--loop.epochs", "updates"), ("--loop.updates", "epochs")):
        if _value(given, flag) not in (None, "None"):
            base = replace(base, loop=replace(base.loop, **{other: None}))
    return base


def _settings_of(path: str) -> Any:
    """The model's and the tokenizers' settings of trained weights, so that flags change these and not others."""
    from twinax.train.warm_start import settings_of

    with one_line_errors():
        return settings_of(Path(path))


def _command(base: RunConfig | None, plot: bool) -> Any:
    """The dataclass that tyro fills: the run's fields at the top, and what the command itself asks for."""
    no_name = tyro.conf.arg(name="")
    out_help = tyro.conf.arg(help="directory of the run (default: runs/NAME, or runs/own); one that is there goes on")
    plot_help = tyro.conf.arg(help="picture of the lengths to write (.png, .pdf, .svg)")

    @dataclass
    class Command:
        run: Annotated[RunConfig, no_name] = tyro.MISSING_NONPROP if base is None else base  # pyright: ignore
        out: Annotated[str | None, out_help] = None
        print_config: Annotated[bool, tyro.conf.arg(help="print the run as JSON, and do nothing else")] = False

    if not plot:
        return Command

    @dataclass
    class WithPlot(Command):
        plot: Annotated[str | None, plot_help] = None

    return WithPlot


def _check_initial(run: RunConfig, base: RunConfig | None) -> None:
    """Raises: UsageError where a flag asks for another tokenizer than the weights bring with them."""
    if run.init_from is None or run.tokenizer.load or base is None or run.tokenizer == base.tokenizer:
        return
    changed = differences(run.tokenizer, base.tokenizer, "tokenizer.")[0]
    raise UsageError(
        f"{changed}: the weights of {run.init_from} bring their tokenizer; leave the flag away, or name another "
        "tokenizer of the same ids by --tokenizer.load"
    )


def _check_from_tokenizers(run: RunConfig, base: RunConfig | None) -> None:
    """Raises: UsageError where a flag asks for what the tokenizers decide."""
    before = base.model if base is not None else RunConfig(corpus=run.corpus).model
    for name in ("src_vocab_size", "tgt_vocab_size", "pad_id", "bos_id", "eos_id"):
        if getattr(run.model, name) != getattr(before, name):
            flag = name.replace("_", "-")
            instead = "--tokenizer.vocab-size" if "vocab" in name else "--tokenizer.special-order"
            raise UsageError(f"--model.{flag}: the tokenizer decides it; give {instead}")
