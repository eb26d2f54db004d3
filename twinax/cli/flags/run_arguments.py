"""Arguments of `twinax train` and `twinax data`: a predefined run, your own corpus, or an existing run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from os.path import exists
from pathlib import Path
from typing import Annotated, Any

import tyro

from ...backend.errors import ConfigError
from ...configs.data import CorpusConfig, TokenizerConfig
from ...configs.run import RunConfig, differences, fine_tuning_defaults
from ...presets.runs import RUN_NAMES, RUNS, run_preset
from ...train.text.spacy_pretokenizer import has_spacy
from ..usage import UsageError, download_hint, one_line_errors
from . import train_help
from .known_flags import check_known

# Flags of the corpus, which every run needs, also work without their prefix.
_SHORT = {f"--{f.name.replace('_', '-')}": f"--corpus.{f.name.replace('_', '-')}" for f in fields(CorpusConfig)}
del _SHORT["--store"]  # of `twinax data`: the one to write
_CORPUS = ("--corpus.src", "--corpus.dataset", "--corpus.store", "--corpus.mixture")


@dataclass(frozen=True)
class Arguments:
    """A run and its directory."""

    name: str | None
    run: RunConfig
    out: Path
    plot: str | None
    store: str | None
    print_config: bool


def parse(
    arguments: Sequence[str], prog: str, description: str, taken: Sequence[str] = (), *, data: bool = False
) -> Arguments:
    """Parse a command line into a run.

    `taken`: flags that the caller has taken; a misspelled one is still there. `data`: with the flags of `twinax data`.

    Raises:
        UsageError: the run does not exist, or flags contradict each other.
        SystemExit: after printing help, or from tyro for unknown flags.
    """
    words = [_long(word) for word in arguments]
    name = words.pop(0) if words and not words[0].startswith("-") else None
    directory = Path(name) if name is not None and (Path(name) / "config.json").is_file() else None
    is_value = [False, *(word.startswith("--") and "=" not in word for word in words)]
    if misplaced_name := next((w for w, value in zip(words, is_value, strict=False) if w in RUNS and not value), None):
        raise UsageError(f"{misplaced_name}: the name of a run must come first, as in {prog} {misplaced_name}")
    base = _base(name, directory, words)
    if {"-h", "--help"} & {*words}:
        train_help.show(prog, description, base or RunConfig(corpus=tyro.MISSING_NONPROP), data)
        sys.exit(0)
    words = ["--help" if word == "--help-all" else word for word in words]
    kind = _command(base, data)
    check_known("data" if data else "train", kind, words, (*_SHORT, "--help-all", *taken))
    try:
        parsed: Any = tyro.cli(kind, args=words, prog=prog, description=description)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    _check_from_tokenizers(parsed.run, base)
    _check_initial(parsed.run, base)
    starts_anew = directory is None or _value(words, "--init-from") is not None
    if directory is not None and parsed.out is not None and not starts_anew:
        raise UsageError(
            f"--out {parsed.out}: {directory} is resumed in its own directory; omit --out, or pass --init-from for a "
            "new run with these settings"
        )
    if directory is not None and parsed.out is None and starts_anew:
        raise UsageError(f"--init-from {parsed.run.init_from}: needs --out, the directory of the new run")
    out = directory if not starts_anew else Path(parsed.out or Path("runs") / (name or "own").replace(":", "-"))
    run = _with_available_pretokenizer(parsed.run, base) if starts_anew else parsed.run
    assert out is not None
    plot, store = (parsed.plot, parsed.store) if data else (None, None)
    return Arguments(name, run, out, plot, store, parsed.print_config)


def _long(word: str) -> str:
    flag, equals, value = word.partition("=")
    flag = flag.replace("_", "-") if flag.startswith("--") else flag
    return f"{_SHORT.get(flag, flag)}{equals}{value}"


def _value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag, as the next word or after `=`."""
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _base(name: str | None, directory: Path | None, words: Sequence[str]) -> RunConfig | None:
    """The run that the flags modify: by name or directory, or None for the defaults."""
    if directory is not None:
        from ...backend.errors import CheckpointError
        from ...train.checkpointing.checkpoints import read_run

        try:
            base = _with_length(read_run(directory), words)
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        given = [flag.removeprefix("--corpus.") for flag in _CORPUS if _value(words, flag) is not None]
        if any(getattr(base.corpus, name) is None for name in given):  # such as the store of its texts
            base = replace(base, corpus=tyro.MISSING_NONPROP)
        return base if _value(words, "--init-from") is None else _with_initial(base, words)
    if name is not None and name not in RUNS:
        suggestions = get_close_matches(name, RUNS, 1)
        hint = f"; did you mean {suggestions[0]}?" if suggestions else ""
        if exists(name):
            hint = "; --init-from starts a run from the weights of any checkpoint"
        raise UsageError(f"{name}: is neither a predefined run ({RUN_NAMES}) nor a run directory{hint}")
    base = _with_length(run_preset(name), words) if name is not None else None
    if base is not None and any(_value(words, flag) for flag in _CORPUS):
        base = replace(base, corpus=tyro.MISSING_NONPROP)
    elif base is not None and _value(words, "--corpus.valid-src") is not None:
        base = replace(base, corpus=replace(base.corpus, valid_split=None, valid_dataset=None))
    if base is not None and _value(words, "--tokenizer.load") is not None:
        base = replace(base, tokenizer=TokenizerConfig())
    return base if _value(words, "--init-from") is None else _with_initial(base, words)


def _with_initial(base: RunConfig | None, words: Sequence[str]) -> RunConfig:
    """The run with the model and the tokenizer of its initial weights; None: fine-tuning with its defaults."""
    adapter = _value(words, "--adapter")
    model, tokenizer = _settings_of(str(_value(words, "--init-from")), None if adapter == "None" else adapter)
    run = RunConfig(corpus=tyro.MISSING_NONPROP, training=fine_tuning_defaults(model)) if base is None else base
    loads_tokenizer = _value(words, "--tokenizer.load") is not None
    # An adapter belongs to the earlier initial weights.
    return replace(run, adapter=None, model=model, tokenizer=TokenizerConfig() if loads_tokenizer else tokenizer)


def _with_available_pretokenizer(run: RunConfig, base: RunConfig | None) -> RunConfig:
    """The run, with a predefined run's spaCy pre-tokenization replaced by punctuation if spaCy is not installed."""
    is_explicit = base is None or run.tokenizer.languages != base.tokenizer.languages
    if is_explicit or not run.tokenizer.languages or run.init_from is not None or has_spacy():
        return run
    print(
        "twinax: spaCy is not installed: pre-tokenizing at whitespace and punctuation instead; pip install "
        "'twinax[spacy]' for spaCy's rules",
        file=sys.stderr,
    )
    return replace(run, tokenizer=replace(run.tokenizer, languages=(), split="punctuation"))


def _with_length(base: RunConfig, words: Sequence[str]) -> RunConfig:
    """The run without its updates if a flag sets epochs, and vice versa."""
    for flag, field in (("--loop.epochs", "updates"), ("--loop.updates", "epochs")):
        if _value(words, flag) not in (None, "None"):
            base = replace(base, loop=replace(base.loop, **{field: None}))
    return base


def _settings_of(path: str, adapter: str | None) -> Any:
    """The model and tokenizer config of trained weights, which the flags then modify."""
    from ...train.loop.warm_start import settings_of

    if not exists(path):
        raise UsageError(f"{path}: there is no such file or directory for the initial weights{download_hint(path)}")
    with one_line_errors():
        return settings_of(Path(path), adapter)


def _command(base: RunConfig | None, data: bool) -> Any:
    """The dataclass that tyro fills: the fields of the run, and the command's own flags."""
    no_name = tyro.conf.arg(name="")
    out_help = tyro.conf.arg(help="run directory; an existing one is resumed (default: runs/NAME, or runs/own)")
    plot_help = tyro.conf.arg(help=train_help.DATA["--plot"])
    store_help = tyro.conf.arg(help=train_help.DATA["--store"])

    @dataclass
    class Command:
        run: Annotated[RunConfig, no_name] = tyro.MISSING_NONPROP if base is None else base  # pyright: ignore
        out: Annotated[str | None, out_help] = None
        print_config: Annotated[bool, tyro.conf.arg(help="print the run as JSON and exit")] = False

    if not data:
        return Command

    @dataclass
    class DataCommand(Command):
        plot: Annotated[str | None, plot_help] = None
        store: Annotated[str | None, store_help] = None

    return DataCommand


def completion_class(name: str) -> Any:
    """The flags of `twinax train` or `data` for shell completion, those of the corpus with and without prefix."""
    no_name, positional = tyro.conf.arg(name=""), tyro.conf.arg(metavar="[NAME|RUN]")

    @dataclass
    class WithShortFlags(_command(None, name == "data")):
        start: Annotated[tyro.conf.Positional[str | None], positional] = None
        short: Annotated[CorpusConfig, no_name] = tyro.MISSING_NONPROP

    return WithShortFlags


def _check_initial(run: RunConfig, base: RunConfig | None) -> None:
    """Raises: UsageError if a flag changes the tokenizer that the initial weights come with."""
    if run.init_from is None or run.tokenizer.load or base is None:
        return
    settings_of_the_run = ("src_lang", "tgt_lang", "bpe_dropout")
    expected = replace(base.tokenizer, **{name: getattr(run.tokenizer, name) for name in settings_of_the_run})
    if run.tokenizer == expected:
        return
    difference = differences(run.tokenizer, expected, "tokenizer.")[0]
    raise UsageError(
        f"{difference}: the weights of {run.init_from} come with their tokenizer; omit the flag, or pass another "
        "tokenizer with the same ids by --tokenizer.load"
    )


def _check_from_tokenizers(run: RunConfig, base: RunConfig | None) -> None:
    """Raises: UsageError if a flag sets a field that the tokenizers determine."""
    model = base.model if base is not None else RunConfig(corpus=run.corpus).model
    for name in ("src_vocab_size", "tgt_vocab_size", "pad_id", "bos_id", "eos_id"):
        if getattr(run.model, name) != getattr(model, name):
            flag = name.replace("_", "-")
            alternative = "--tokenizer.vocab-size" if "vocab" in name else "--tokenizer.special-order"
            raise UsageError(f"--model.{flag}: the tokenizer determines it; use {alternative}")
